"""Rows of the benchmark run the engine's kernels."""

from tests.support.interpreter import choose_interpreter

choose_interpreter()
