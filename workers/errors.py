"""What a person meets when a worker cannot go on."""


class WorkerError(Exception):
    """The worker cannot start or go on; one sentence that says why."""
