"""Group commit of appends to one batch: threads that append at once share a commit.

The disk takes as long for all of them as for one.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from weakref import WeakValueDictionary

from jobs.batch.appending import requests_of
from jobs.batch.input_files import InputLine
from jobs.batch.invalid_lines import Served
from jobs.batch.manifest import BatchSpec
from jobs.batch.open_requests import AppendBounds, AppendOutcome, CheckedLines
from jobs.protocol.results import ApiError


class AppendGroup:
    """The concurrent appends of this process to one batch. Thread-safe."""

    def __init__(self, spec: BatchSpec) -> None:
        self._requests = requests_of(spec)
        self._waiting: list[tuple[CheckedLines, Future[AppendOutcome]]] = []
        self._changing = threading.Lock()
        self._committing = threading.Lock()

    def append(self, lines: Sequence[InputLine], served: Served, bounds: AppendBounds) -> AppendOutcome:
        """Append like `OpenRequests.append`."""
        checked, outcome = self._requests.check(lines, served, bounds), Future[AppendOutcome]()
        with self._changing:
            self._waiting.append((checked, outcome))
        with self._committing:
            if not outcome.done():  # an earlier thread may have committed it
                self._commit()
        return outcome.result()

    def _commit(self) -> None:
        with self._changing:
            group, self._waiting = self._waiting, []
        try:
            outcomes = self._requests.commit([checked for checked, _ in group])
        except BaseException as error:
            for _, outcome in group:
                outcome.set_exception(error)
            return
        for (_, outcome), found in zip(group, outcomes, strict=True):
            if isinstance(found, ApiError):
                outcome.set_exception(found)
            else:
                outcome.set_result(found)


_groups: WeakValueDictionary[str, AppendGroup] = WeakValueDictionary()
_changing = threading.Lock()


def group_of(spec: BatchSpec) -> AppendGroup:
    """Return the group of a batch, which exists while a thread uses it."""
    with _changing:
        return _groups.setdefault(spec.root, AppendGroup(spec))
