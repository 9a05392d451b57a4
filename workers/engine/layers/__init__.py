"""What the model files are made of.

Every layer is a plain callable over tensors: no gradients, so no modules.
"""
