"""`pipeline top`: samples of a fleet, rates computed from them, and the display in a terminal."""
