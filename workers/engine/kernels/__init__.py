"""Triton kernels.

Only this package imports triton, and only the backend that uses the package imports it.
"""
