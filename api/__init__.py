"""The HTTP face of the pipeline.

It holds no state: any number of these processes may run behind a load balancer.
"""
