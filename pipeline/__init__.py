"""The command line, and the assembly of every process on one machine."""
