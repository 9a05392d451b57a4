"""Shared tools of the tests: waiting for a condition, running a private Redis."""
