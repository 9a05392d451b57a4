"""Compile output formats to llguidance grammars, in a process that can be killed."""
