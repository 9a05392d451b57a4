"""One pass over the lines of an input; it finds problems, or writes the plan and the line index."""

import hashlib
import heapq
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from jobs.batch.input_files import MAX_LINE_BYTES, InputLine
from jobs.batch.line_index import LineIndexWriter
from jobs.batch.manifest import BatchSpec, LineProblem
from jobs.batch.plan import PLAN_NAME, PlanBuilder, PlanEntry, Sorter
from jobs.protocol import fields
from jobs.protocol.endpoints import BATCH_ENDPOINTS
from jobs.protocol.lines import Line, read_line
from jobs.protocol.unknown_members import UnknownMember, UnknownMembers
from jobs.protocol.validation import LineError, check_batch_line, check_line
from jobs.queue.request_queue import Queue
from jobs.store.storage import join, local_path, open_input

MAX_PROBLEMS = 1000

_LOADING = ("loading", "initializing")
_BYTES_PER_TOKEN = 4  # the estimate of `claim.lua`
_ID_RECORD_BYTES = 24  # hash of the custom_id, line, offset, length


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a pass; `problems` is empty for a valid file."""

    total: int = 0
    models: list[str] = []
    endpoints: list[str] = []
    unknown_members: list[UnknownMember] = []
    problems: list[LineProblem] = []
    plan_sha256: str = ""


def estimated_tokens(size: int) -> int:
    """Return the estimated tokens of bodies of `size` bytes in total."""
    return -(-size // _BYTES_PER_TOKEN)


class ServedModels(Mapping[str, tuple[str, ...] | None]):
    """Models that are, were or will soon be served, including on-demand ones, with known tasks.

    An emptied Redis gets them with the workers' next renewals. While it may lack some, `pause` is
    called for each missing name before Redis is read again.
    """

    def __init__(self, queue: Queue, pause: Callable[[], object], patience: float, known: Iterable[str] = ()) -> None:
        """`patience` is the longest wait in seconds, `known` has additional models."""
        self._queue = queue
        self._pause = pause
        self._deadline = time.monotonic() + min(queue.settings.lease_seconds, patience)
        self._known = [*known, *queue.settings.on_demand_models]
        self._registered = self._read_registered()
        self._others: dict[str, None] | None = None  # read once a name is not registered

    def __getitem__(self, name: str) -> tuple[str, ...] | None:
        return self._registered[name] if name in self._registered else self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __contains__(self, name: object) -> bool:
        if name in self._registered:
            return True
        while name not in self._all() and self._may_lack_some():
            self._pause()
            self._registered, self._others = self._read_registered(), None
        return name in self._all()

    def _may_lack_some(self) -> bool:
        if time.monotonic() < self._deadline and self._queue.registry_age() < self._queue.settings.lease_seconds:
            return True
        self._deadline = -math.inf  # Redis is not read for each further name
        return False

    def _all(self) -> dict[str, tuple[str, ...] | None]:
        """Return the models; tasks are None for a model that a worker is still loading."""
        if self._others is None:
            loading = [name for one in self._queue.workers() if one.state in _LOADING for name in one.models]
            self._others = dict.fromkeys([*self._known, *self._queue.on_demand(), *loading])
        return self._others | self._registered

    def _read_registered(self) -> dict[str, tuple[str, ...]]:
        return {model.name: model.tasks for model in self._queue.models()}


def check_of(spec: BatchSpec, line: InputLine, served: Mapping[str, Collection[str] | None]) -> Line | LineError:
    """Return a line of the batch, or its error."""
    if line.raw is None:
        return too_long(spec, line.number)
    if spec.of_api:
        return check_batch_line(line.raw, line.number, spec.endpoint, served, spec.strict_parameters)
    return check_line(line.raw, line.number, spec.endpoint, served, spec.default_model, spec.strict_parameters)


def too_long(spec: BatchSpec, line: int) -> LineError:
    """Return the error for a line that is too long."""
    code = "invalid_request" if spec.of_api else "line_too_long"
    return LineError(code, line, None, f"This line is longer than {MAX_LINE_BYTES} bytes.")


def duplicate_of(custom_id: str, line: int, original: int) -> LineProblem:
    """Return the problem of a line with the custom_id of another one."""
    message = (
        f"The custom_id '{fields.shown(custom_id)}' for this request is a duplicate of another request. The"
        f" custom_id parameter must be unique for each request in a batch. Line {original} has it already."
    )
    return LineProblem("duplicate_custom_id", message, line, "custom_id")


def refused(code: str, message: str, param: str | None = None) -> Checked:
    """Return a result that refuses the file as a whole."""
    return Checked(problems=[LineProblem(code, message, None, param)])


class SourceCheck:
    """Checks every line once, in order; `finish` may be called if `problems` is empty.

    `served` are the models that lines may name, each with its tasks if they are known.
    """

    def __init__(self, spec: BatchSpec, root: str, served: Mapping[str, Collection[str] | None]) -> None:
        folder = local_path(root)
        self.body_bytes = 0
        self._spec = spec
        self._root = root
        self._served = served
        self._models: set[str] = set()
        self._endpoints: set[str] = set()
        self._unknown = UnknownMembers()
        self._problems = _Problems()
        self._plan = PlanBuilder(folder, by_model=spec.by_model)
        self._ids = _CustomIds(folder)
        self._index = LineIndexWriter(root) if spec.of_api else None

    def add(self, line: InputLine) -> bytes | None:
        """Check one line; return its sort key by prefix, None for a bad line."""
        return self.take(line, check_of(self._spec, line, self._served))

    def take(self, line: InputLine, found: Line | LineError) -> bytes | None:
        """Add a line that was checked already."""
        if isinstance(found, LineError):
            self._problems.add(found)
            return None
        entry = PlanEntry(line.number, line.offset, len(line.raw or b""))
        self._ids.add(found.custom_id, entry)
        endpoint = BATCH_ENDPOINTS[found.url]
        if not endpoint.members.issuperset(found.values):
            self._unknown.add(found.values, endpoint)
        order = self._plan.add(entry, endpoint, found.model, found.values)
        if self._index is not None:
            self._index.add(entry)
        self._models.add(found.model)
        self._endpoints.add(found.url)
        self.body_bytes += len(found.body)
        return order

    def problems(self, source: str) -> list[LineProblem]:
        """Return the problems in line order: at most `MAX_PROBLEMS`, and a count of further bad
        lines.
        """
        return self._problems.listed(*self._ids.duplicates(source))

    def finish(self) -> Checked:
        """Write the plan and the index of a file without problems. Raise `StoreError`."""
        if self._index is not None:
            self._index.commit()
        plan_sha256 = self._plan.write(join(self._root, PLAN_NAME))
        return Checked(
            total=self._plan.lines,
            models=sorted(self._models),
            endpoints=sorted(self._endpoints),
            unknown_members=self._unknown.listed(),
            plan_sha256=plan_sha256,
        )

    def close(self) -> None:
        """Release memory and disk."""
        self._plan.close()
        self._ids.close()
        if self._index is not None:
            self._index.close()


class _Problems:
    """Bad lines; at most `MAX_PROBLEMS` are kept."""

    def __init__(self) -> None:
        self._kept: list[LineProblem] = []
        self._count = 0

    def add(self, error: LineError) -> None:
        self._count += 1
        if len(self._kept) < MAX_PROBLEMS:
            self._kept.append(LineProblem(error.code, error.message, error.line, error.param))

    def listed(self, repeated: int, duplicates: list[LineProblem]) -> list[LineProblem]:
        """Return the problems with `duplicates`, which describe some of the `repeated` lines."""
        listed = sorted([*self._kept, *duplicates], key=lambda problem: problem.line or 0)[:MAX_PROBLEMS]
        if more := self._count + repeated - len(listed):
            message = f"{more} more lines are bad; the first {len(listed)} are listed."
            listed.append(LineProblem("too_many_errors", message))
        return listed


class _CustomIds:
    """Finds repeated custom_ids with 24 bytes per line, most of them on disk."""

    def __init__(self, folder: Path | None) -> None:
        self._sorter = Sorter(_ID_RECORD_BYTES, folder)

    def add(self, custom_id: str, entry: PlanEntry) -> None:
        digest = hashlib.blake2b(custom_id.encode(), digest_size=8).digest()
        self._sorter.add(
            digest + entry.line.to_bytes(4, "big") + entry.offset.to_bytes(8, "big") + entry.length.to_bytes(4, "big")
        )

    def duplicates(self, source: str) -> tuple[int, list[LineProblem]]:
        """Return how many lines repeat an earlier custom_id, and up to `MAX_PROBLEMS` problems."""
        count = 0
        first_lines: list[tuple[int, PlanEntry, PlanEntry]] = []  # heap, the highest line on top
        original = b""
        for record in self._sorter:
            if record[:8] != original[:8]:
                original = record
                continue
            count += 1
            entry = _entry(record)
            item = (-entry.line, entry, _entry(original))
            if len(first_lines) < MAX_PROBLEMS:
                heapq.heappush(first_lines, item)
            else:
                heapq.heappushpop(first_lines, item)
        return count, _describe(source, sorted(first_lines, reverse=True))

    def close(self) -> None:
        self._sorter.close()


def _entry(record: bytes) -> PlanEntry:
    return PlanEntry(
        int.from_bytes(record[8:12], "big"), int.from_bytes(record[12:20], "big"), int.from_bytes(record[20:24], "big")
    )


def _describe(source: str, found: list[tuple[int, PlanEntry, PlanEntry]]) -> list[LineProblem]:
    if not found:
        return []
    problems = []
    with open_input(source) as file:
        for _, entry, original in found:
            file.seek(entry.offset)
            custom_id = read_line(file.read(entry.length)).custom_id
            problems.append(duplicate_of(custom_id, entry.line, original.line))
    return problems
