"""Graphs, pinned copies, and what torch raises where memory is short."""
