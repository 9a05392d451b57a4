"""The HTTP face of the pipeline.

It holds no state: any number of these processes stand behind a load balancer.
"""
