"""What goes over the wire: requests, parameters, bodies, results, ids and states. No I/O."""
