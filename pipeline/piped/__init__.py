"""`run-batch -`: lines of a pipe run as they arrive, and leave as they finish."""
