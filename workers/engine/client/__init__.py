"""Drive an engine core that runs in another process."""
