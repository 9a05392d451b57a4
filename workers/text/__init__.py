"""Text on its way to the engine and back: chat templates, tokenizing, incremental detokenizing,
stop strings.
"""
