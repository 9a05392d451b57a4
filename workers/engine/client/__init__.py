"""The handle on an engine core that runs in another process."""
