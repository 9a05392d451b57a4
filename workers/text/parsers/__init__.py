"""Readers of what models write by convention: calls of tools, and reasoning before the answer."""
