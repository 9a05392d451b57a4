"""Requests, batches and results: their formats, the queue in Redis, and the jobs that run
batches.
"""
