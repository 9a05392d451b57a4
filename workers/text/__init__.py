"""Convert text for the engine and back: chat templates, tokenization, incremental detokenization,
stop strings.
"""
