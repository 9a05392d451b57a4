"""Outputs that follow a grammar: which tokens may come next. Imports no torch, and the library that
matches grammars only once there is one.
"""
