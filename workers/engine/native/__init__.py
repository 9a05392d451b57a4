"""The engine's arithmetic on a CPU, in C: `source/` holds it, `build` compiles it, `choose` finds
the compiled one, `library` loads it, and the rest is Python's side of each part.
"""
