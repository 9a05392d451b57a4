from workers.engine.process import bound_spinning

bound_spinning()  # as the engine core does, and before anything here loads torch
