"""What a person meets when a worker cannot go on."""


class WorkerError(Exception):
    """The worker cannot start or go on; one sentence that says why.

    `passing`: a later start may do better, with nothing changed.
    """

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing
