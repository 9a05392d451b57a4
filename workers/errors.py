"""Errors that end a worker with one sentence for its operator."""


class WorkerError(Exception):
    """The worker cannot start or continue; the message is one sentence.

    `passing`: a later start may succeed with nothing changed.
    """

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing
