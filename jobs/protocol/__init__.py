"""The wire formats: requests, parameters, bodies, results, ids and states. No I/O."""
