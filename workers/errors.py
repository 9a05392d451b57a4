"""Errors that end a worker with one sentence for its operator."""


class WorkerError(Exception):
    """The worker cannot start or continue; the message is one sentence.

    `retry` means that a later start may succeed with nothing changed.
    """

    exit_code = 2

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry
