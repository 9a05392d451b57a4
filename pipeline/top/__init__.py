"""`pipeline top`: what is read of a fleet, the rates that follow, and how a terminal shows it."""
