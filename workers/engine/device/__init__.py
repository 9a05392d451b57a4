"""The device side of a replica: weights, memory, steps and ranks."""
