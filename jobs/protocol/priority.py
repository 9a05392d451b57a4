"""What decides whose batch is next: the priority of a batch and the weight of a tenant."""

MOST_PRIORITY = 100
"""Priorities are from -100 to 100, a lower one first; the scores of the queue have room for few
more (`common.lua`).
"""
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0
