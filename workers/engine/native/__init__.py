"""The engine's arithmetic on a CPU, in C.

`source/` has the C code, `build` compiles it, `choose` finds the compiled library, and `library`
loads it. The other modules are the Python side of each part.
"""
