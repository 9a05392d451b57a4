"""Checkpoints: where they are, which code runs them, their formats, and how weights are read."""
