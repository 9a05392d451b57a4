"""CUDA graphs, pinned copies, and torch's errors for want of memory."""
