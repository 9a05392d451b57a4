"""The processes and jobs that run batches: slices, validate, advance, finalize, ticker, RQ
worker.
"""
