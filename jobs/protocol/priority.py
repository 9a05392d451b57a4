"""The order of batches: the priority of a batch and the weight of a tenant."""

MOST_PRIORITY = 100
"""The range of priorities, a lower one first; the queue's scores allow few more (`common.lua`)."""
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0
