"""Forms of answers become grammars of llguidance, compiled in a process that can be killed."""
