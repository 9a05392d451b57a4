"""Provide the layers that model files are built from.

Every layer is a plain callable over tensors: no gradients, so no modules.
"""
