"""Guided outputs: the tokens that a grammar allows next.

The package does not import torch. It imports the grammar library only when a request has a grammar.
"""
