"""A step's input tensors: the interface, and the implementation on the host."""
