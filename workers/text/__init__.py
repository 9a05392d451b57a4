"""Text on its way to the engine and back: chat templates, tokenising, incremental detokenising,
stop strings.
"""
