"""Triton kernels.

Nothing outside this package imports triton, and this package is imported only where a backend that
uses it is chosen.
"""
