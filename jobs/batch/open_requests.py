"""The requests of an open batch: its clients append them while it runs, until they close it.

An append writes lines to the batch's source, its plan and its line index, makes these durable, and
then commits their lengths and the custom_ids to a database. A process that is killed between two of
these steps leaves uncommitted bytes, which the next append cuts off. Concurrent appends wait for
each other by locks of the folder, in turns.
"""

import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec

from jobs.batch.appended import AppendedLine, Committed, decode_committed
from jobs.batch.input_files import MAX_LINE_BYTES, InputLine
from jobs.batch.invalid_lines import Served, marked_line, placeholder_for, unmarked_line
from jobs.batch.line_index import append_index
from jobs.batch.manifest import BatchSpec, LineProblem
from jobs.batch.plan import PLAN_NAME, PlanBuilder, PlanEntry, append_plan
from jobs.batch.source_check import check_of, duplicate_of, estimated_tokens, too_long
from jobs.protocol.endpoints import BATCH_ENDPOINTS
from jobs.protocol.lines import Line, decode_json
from jobs.protocol.results import ApiError
from jobs.protocol.validation import LineError
from jobs.store.storage import (
    Busy,
    StoreError,
    StoreFull,
    append_behind,
    exclusive,
    join,
    local_path,
    make_folder,
    size_of,
    sync_folder,
)

DATABASE_NAME = "requests.db"
JOURNAL_NAME = "requests.db-journal"
SOURCE_NAME = "input.jsonl"
"""The source of an open batch, in its folder."""

APPEND_LOCK = ".append.lock"
NEXT_LOCK = ".next-append.lock"
"""The lock of the append that waits for the other lock; a process that just released that one
queues behind it.
"""

_LOCK_SECONDS = 60.0  # longest wait of one append for others
_ASKED_AT_ONCE = 500  # ids in one statement
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS requests (id BLOB PRIMARY KEY, digest BLOB NOT NULL, line INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS committed (place INTEGER PRIMARY KEY CHECK (place = 1), content BLOB NOT NULL);
INSERT OR IGNORE INTO committed VALUES (1, '{}');
COMMIT;
"""


class AppendBounds(NamedTuple):
    """Limits of the batch including the append; None: any number."""

    lines: int | None = None
    bytes: int | None = None  # of all lines
    tokens: int | None = None  # an estimate from the lines' bodies
    tokens_at_once: int | None = None  # of one append


class AppendOutcome(NamedTuple):
    """The result of one append; `problems` are those of lines that did not become part of the
    batch.
    """

    appended: int
    repeated: int  # lines that the batch had already
    problems: list[LineProblem]
    total: int  # lines of the batch
    body_bytes: int  # of all its lines


class CheckedLines(NamedTuple):
    """Checked lines of one append."""

    lines: "dict[int, _NewLine]"  # lines that can be stored, by place
    problems: list[LineProblem]
    order: list[int]  # places in the order of the plan
    bounds: AppendBounds
    repeats: dict[int, int]  # set by the commit: numbers in the append, and the lines that they repeat


class _NewLine(NamedTuple):
    number: int  # in the append
    custom_id: str
    id: bytes  # hash of the custom_id
    digest: bytes  # of the line as received
    content: bytes  # as stored
    size: int  # of the body
    model: str
    url: str
    values: dict[str, Any]  # of the body


class _NewContent:
    """The additions of one commit."""

    def __init__(self, found: Committed) -> None:
        self.taken = found
        self.content: list[bytes] = []
        self.entries: list[PlanEntry] = []
        self.planned: list[PlanEntry] = []
        self.known: dict[bytes, AppendedLine] = {}  # by id

    def take(self, fresh: dict[int, _NewLine], append: CheckedLines) -> ApiError | None:
        """Add the lines of an append after the others, or return why they are refused."""
        before, entries = self.taken, dict[int, PlanEntry]()
        offset = before.bytes
        for number, (place, line) in enumerate(fresh.items(), before.lines + 1):
            entries[place] = PlanEntry(number, offset, len(line.content))
            offset += len(line.content)
        taken = Committed(
            before.lines + len(fresh),
            offset,
            before.body_bytes + sum(line.size for line in fresh.values()),
            sorted({*before.models, *(line.model for line in fresh.values())}),
            sorted({*before.endpoints, *(line.url for line in fresh.values())}),
            time.time(),
        )
        if refusal := _refusal(before, taken, append.bounds):
            return refusal
        self.taken = taken
        self.content += (line.content for line in fresh.values())
        self.entries += entries.values()
        self.planned += (entries[place] for place in append.order if place in entries)
        self.known |= {line.id: AppendedLine(line.digest, entries[place].line) for place, line in fresh.items()}
        return None


_FindKnown = Callable[[list[bytes]], dict[bytes, AppendedLine]]
"""Returns the lines of a batch that have these ids."""


class OpenRequests:
    """The requests of one open batch. Methods raise `StoreError`.

    Without `durable` a power loss may lose appended lines. Nothing stays open between two calls,
    unless the object `keeps_open` the database, which is faster and for a single thread.
    """

    def __init__(self, spec: BatchSpec, durable: bool = True, keeps_open: bool = False) -> None:
        self._spec = spec
        self._durable = durable
        self._keeps_open = keeps_open
        self._kept: sqlite3.Connection | None = None
        self._location = join(spec.root, DATABASE_NAME)

    def create(self) -> None:
        """Create the files of a batch without lines, unless they exist."""
        make_folder(self._spec.root)
        with self._connected("rwc") as database:
            database.executescript(_SCHEMA)
        with self._transaction() as database:
            found = self._read(database)
            if not found.lines:
                self._append_files(found, b"", [], [])
        sync_folder(self._spec.root)

    def committed(self) -> Committed:
        """Return the committed state."""
        with self._connected("rw") as database:
            return self._read(database)

    def append(self, lines: Sequence[InputLine], served: Served, bounds: AppendBounds) -> AppendOutcome:
        """Append the lines that the batch does not have, durably.

        An invalid line becomes a placeholder with its error (`invalid_lines`). A line without a
        usable custom_id, or with that of another line, becomes a problem. All lines are held in
        memory.

        Raise `ApiError`: 409 for a closed batch, 400 or 429 if the batch would exceed `bounds`.
        """
        [outcome] = self.commit([self.check(lines, served, bounds)])
        if isinstance(outcome, ApiError):
            raise outcome
        return outcome

    def check(self, lines: Sequence[InputLine], served: Served, bounds: AppendBounds) -> CheckedLines:
        """Check the lines of one append, and order them."""
        checked, problems = self._check(lines, served)
        return CheckedLines(checked, problems, [entry.line for entry in self._planned(checked)], bounds, {})

    def commit(self, appends: Sequence[CheckedLines]) -> list[AppendOutcome | ApiError]:
        """Commit several appends in order and durably; return the outcome of each.

        Raise `ApiError` 409 for a closed batch.
        """
        with self._transaction() as database:
            found = self._read(database)
            new, outcomes = self._taken(found, appends, partial(self._known, database))
            if new.entries:
                self._append_files(found, b"".join(new.content), new.entries, new.planned)
                rows = ((name, *known) for name, known in new.known.items())
                database.executemany("INSERT INTO requests VALUES (?, ?, ?)", rows)
                self._write(database, new.taken)
        return outcomes

    def _taken(
        self, found: Committed, appends: Sequence[CheckedLines], known: _FindKnown
    ) -> tuple["_NewContent", list[AppendOutcome | ApiError]]:
        """Return the additions to the committed state, and the outcome of each append.

        Raise `ApiError` 409.
        """
        if found.closed:
            raise closed_error()
        new = _NewContent(found)
        return new, [self._add(known, new, one) for one in appends]

    def close(self) -> None:
        """Close the batch for appends; may be repeated, also after the batch has ended."""
        with contextlib.suppress(ApiError), self._transaction() as database:
            found = self._read(database)
            if not found.closed:
                self._append_files(found, b"", [], [])
                self._write(database, msgspec.structs.replace(found, closed=True))

    def _check(self, lines: Sequence[InputLine], served: Served) -> tuple[dict[int, _NewLine], list[LineProblem]]:
        """Return the lines that can be stored, by place, and the problems of the others."""
        judged = [(line, check_of(self._spec, line, served)) for line in lines]
        valid = next(((found.url, found.model) for _, found in judged if isinstance(found, Line)), None)
        checked, problems = dict[int, _NewLine](), list[LineProblem]()
        for place, (line, found) in enumerate(judged):
            if isinstance(found, LineError):
                valid = valid or self._target(served)
                stored = None if valid is None else _invalid_line(line, found, *valid)
            else:
                stored = _valid_line(line, found)
            if stored is not None and len(stored.content) <= MAX_LINE_BYTES:
                checked[place] = stored
                continue
            error = found if isinstance(found, LineError) else too_long(self._spec, line.number)
            problems.append(LineProblem(error.code, error.message, line.number, error.param))
        return checked, problems

    def _target(self, served: Served) -> tuple[str, str] | None:
        """Return url and model of placeholders if no line of the append is valid.

        None if no model is served.
        """
        with self._until_removed():
            found = self.committed()
        model = next(iter([*found.models, *sorted(served)]), self._spec.default_model)
        url = self._spec.endpoint or next(iter(found.endpoints), next(iter(BATCH_ENDPOINTS)))
        return None if model is None else (url, model)

    def _planned(self, checked: dict[int, _NewLine]) -> Iterator[PlanEntry]:
        """Yield the lines in the order in which they run; `line` is their place."""
        with contextlib.closing(PlanBuilder(by_model=self._spec.by_model)) as plan:
            for place, new in checked.items():
                plan.add(PlanEntry(place, 0, 0), BATCH_ENDPOINTS[new.url], new.model, new.values)
            yield from plan.ordered()

    def _add(self, find: _FindKnown, new: "_NewContent", append: CheckedLines) -> AppendOutcome | ApiError:
        """Add the new lines of an append, unless they exceed its bounds."""
        known = find([line.id for line in append.lines.values()]) | new.known
        fresh, repeated, problems = dict[int, _NewLine](), 0, append.problems.copy()
        for place, line in append.lines.items():
            if (original := known.get(line.id)) is None:
                fresh[place] = line
                known[line.id] = AppendedLine(line.digest, new.taken.lines + len(fresh))
            elif original.digest == line.digest:
                repeated += 1
                append.repeats[line.number] = original.line
            else:
                problems.append(duplicate_of(line.custom_id, line.number, original.line))
        if fresh and (refusal := new.take(fresh, append)):
            return refusal
        problems.sort(key=lambda problem: problem.line or 0)
        return AppendOutcome(len(fresh), repeated, problems, new.taken.lines, new.taken.body_bytes)

    def _known(self, database: sqlite3.Connection, ids: list[bytes]) -> dict[bytes, AppendedLine]:
        """Return the lines that have these ids."""
        known = dict[bytes, AppendedLine]()
        for start in range(0, len(ids), _ASKED_AT_ONCE):
            some = ids[start : start + _ASKED_AT_ONCE]
            marks = ",".join("?" * len(some))
            rows = database.execute(f"SELECT id, digest, line FROM requests WHERE id IN ({marks})", some)
            known |= {name: AppendedLine(digest, line) for name, digest, line in rows}
        return known

    def _append_files(
        self, found: Committed, content: bytes, entries: list[PlanEntry], planned: list[PlanEntry]
    ) -> None:
        """Write lines after the committed ones, and cut off those of a killed process."""
        root = self._spec.root
        writes = [
            partial(append_behind, self._spec.input, found.bytes, content, self._durable),
            partial(append_plan, join(root, PLAN_NAME), found.lines, planned, self._durable),
        ]
        if self._spec.of_api:
            writes.append(partial(append_index, root, found.lines, entries))
        if not self._durable:
            for write in writes:
                write()
            return
        # A disk takes as long for all of them at once as for one.
        with ThreadPoolExecutor(len(writes)) as writers:
            for written in [writers.submit(write) for write in writes]:
                written.result()

    def _read(self, database: sqlite3.Connection) -> Committed:
        [(content,)] = database.execute("SELECT content FROM committed")
        return decode_committed(content)

    def _write(self, database: sqlite3.Connection, found: Committed) -> None:
        database.execute("UPDATE committed SET content = ?", [msgspec.json.encode(found)])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the database exclusively; commit, durably, unless the body raises.

        Raise `ApiError` 409 for a batch that has ended.
        """
        with self._until_removed(), self._turn(), self._connected("rw") as database:
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")

    @contextlib.contextmanager
    def _until_removed(self) -> Iterator[None]:
        """Treat a batch without a database as closed, also if it is removed meanwhile."""
        if size_of(self._location) is None:
            raise closed_error()
        try:
            yield
        except StoreError:
            if size_of(self._location) is None:
                raise closed_error() from None
            raise

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for earlier appends.

        With SQLite's lock alone, a process that commits without a pause starves the others.
        """
        root = self._spec.root
        try:
            with contextlib.ExitStack() as held:
                with exclusive(root, _LOCK_SECONDS, NEXT_LOCK):
                    held.enter_context(exclusive(root, _LOCK_SECONDS, APPEND_LOCK))
                yield
        except Busy as error:
            raise StoreError(str(error)) from error

    @contextlib.contextmanager
    def _connected(self, mode: str) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.ExitStack() as stack:
                connection, self._kept = self._kept or self._connect(mode), None
                stack.enter_context(contextlib.closing(connection))
                yield connection
                if self._keeps_open:
                    self._kept = connection
                    stack.pop_all()
        except sqlite3.Error as error:
            is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            raise (StoreFull if is_full else StoreError)(f"cannot use {self._location}: {error}") from error

    def _connect(self, mode: str) -> sqlite3.Connection:
        path = local_path(self._location)
        assert path is not None, "a batch's root is local"
        uri = f"{path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(uri, _LOCK_SECONDS, isolation_level=None, uri=True)
        # Unlike a journal's removal, its truncation is made durable.
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'OFF'}")
        return connection


def closed_error() -> ApiError:
    """Return the error for an append to a closed batch."""
    return ApiError(409, "This batch is closed, so it takes no more requests: create another batch for them.")


def _refusal(before: Committed, taken: Committed, bounds: AppendBounds) -> ApiError | None:
    """Return why the batch may not have the appended lines, or None."""
    tokens = estimated_tokens(taken.body_bytes)
    for has, most, unit in ((taken.lines, bounds.lines, ""), (taken.bytes, bounds.bytes, " bytes")):
        if most is not None and has > most:
            message = f"With these requests the batch would have {has}{unit}, and it may have {most}"
            return ApiError(400, f"{message}: close it, and create another batch for the rest.", code="too_many_tasks")
    new = estimated_tokens(taken.body_bytes - before.body_bytes)
    if bounds.tokens_at_once is not None and new > bounds.tokens_at_once:
        message = f"These requests have about {new} tokens, and {bounds.tokens_at_once} may be queued: append fewer."
        return ApiError(400, message, code="token_limit_exceeded")
    if bounds.tokens is not None and tokens > bounds.tokens:
        message = (
            f"These requests have about {new} tokens, and {max(0, bounds.tokens - tokens + new)} are left of those that"
            " may be queued in your batches: try again when more requests have an answer, or another batch has ended."
        )
        return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded")
    return None


def _valid_line(line: InputLine, found: Line) -> _NewLine:
    raw = _text_of(line)
    name, content = _id_of(found.custom_id), unmarked_line(raw) + b"\n"
    size = len(found.body)
    return _NewLine(
        line.number, found.custom_id, name, _digest(raw), content, size, found.model, found.url, found.values
    )


def _invalid_line(line: InputLine, error: LineError, url: str, model: str) -> _NewLine | None:
    raw, placeholder = _text_of(line), placeholder_for(url, model)
    if (content := marked_line(raw, error, placeholder)) is None:
        return None
    custom_id = decode_json(content)["custom_id"]
    name = _id_of(custom_id)
    return _NewLine(line.number, custom_id, name, _digest(raw), content, 0, model, url, placeholder["body"])


def _text_of(line: InputLine) -> bytes:
    return b"" if line.raw is None else line.raw.strip()


def _id_of(custom_id: str) -> bytes:
    return _digest(custom_id.encode(errors="surrogatepass"))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
