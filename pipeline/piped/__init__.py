"""`run-batch -`: lines of stdin run as they arrive; answers are written as they finish."""
