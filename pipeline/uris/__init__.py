"""Inputs and outputs of `run-batch` that are URIs: fetched before a run, uploaded after it."""
