"""Attention over the paged cache: its interface, and plain torch."""
