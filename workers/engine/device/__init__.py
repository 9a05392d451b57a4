"""What runs on the device: weights, memory, steps and ranks."""
