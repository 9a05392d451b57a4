"""Messages between an engine core, its client and its ranks."""
