"""A step's tensors: their interface, and how they are made on the host."""
