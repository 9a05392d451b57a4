"""Requests, batches and their results: what they are, how they travel through Redis, and the jobs
that feed and finish batches.
"""
