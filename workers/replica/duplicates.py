"""Deduplicate requests of one batch that must get the same answer. One of them, the original, runs;
its copies wait for its answer.

Each copy is held under its own lease and takes no engine slot. If the original ends without an
answer, the first copy becomes the original. If the original fails, all copies run: most often each
fails in the same way, and running them one after another would take many times as long.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jobs.protocol.requests import Claim, Finished, RequestKey
from workers.replica.due_tokens import AnyInFlight
from workers.replica.pooling_in_flight import PreparedPooling
from workers.replica.prepared import Prepare, Prepared
from workers.replica.tracing import RequestTraces

MAX_KEPT_BYTES = 1 << 24
"""Largest memory, in bytes, of finished answers kept for copies claimed later."""

MAX_COPIES = 128
"""Most copies that wait for running originals; further duplicates run. Waiting copies delay no
other work, and their answers add at most this many results in Redis.
"""

_BYTES_OF_OBJECTS = 10  # about: size in memory of one byte of JSON
_BYTES_OF_TOKEN = 200  # about: size in memory of one token, shown or not
_MOST_SUSPECTS = 4096  # all are forgotten above this number

Digest = tuple[str, bytes]
"""A batch id, and the digest of a request from `digest_of`."""


def prepare_once(
    prepare: Prepare,
    known: Callable[[Digest], Prepared | None],
    traces: RequestTraces | None,
    claims: Sequence[Claim],
) -> tuple[list[Prepared], list[Finished]]:
    """Prepare requests, but only one of each set of duplicates; return them in claim order.

    The other duplicates get a copy of the prepared request. `known` is `Duplicates.prepared`. Every
    request of a set is prepared by itself if the first one is not deterministic or cannot run.
    """
    digests = {claim.key: (claim.key.batch, digest) for claim in claims if (digest := digest_of(claim))}
    alike = {digest: item for digest in set(digests.values()) if (item := known(digest)) is not None}
    firsts = {digest: key for key, digest in reversed(digests.items()) if digest not in alike}

    def prepare_some(some: Sequence[Claim]) -> tuple[list[Prepared], list[Finished]]:
        prepared, errors = prepare(some) if some else ([], [])
        for item in prepared:
            digest = digests.get(item.claim.key)
            if digest is not None and (isinstance(item, PreparedPooling) or item.call.is_deterministic):
                item.digest = digest[1]
                alike[digest] = item
        return prepared, errors

    own = {claim.key for claim in claims if claim.key not in digests} | set(firsts.values())
    prepared, errors = prepare_some([claim for claim in claims if claim.key in own])
    others = [claim for claim in claims if claim.key not in own]
    copies = [dataclasses.replace(alike[d], claim=claim) for claim in others if (d := digests[claim.key]) in alike]
    if traces is not None:
        traces.copied(copies)
    copied = {item.claim.key for item in copies}
    more, more_errors = prepare_some([claim for claim in others if claim.key not in copied])
    turns = {claim.key: turn for turn, claim in enumerate(claims)}
    everything = sorted([*prepared, *copies, *more], key=lambda item: turns[item.claim.key])
    return everything, [*errors, *more_errors]


def digest_of(claim: Claim) -> bytes:
    """Return the digest of a request's endpoint, mark and body, byte for byte; equal digests in a
    batch mean duplicates.

    It is empty for a live call, and for a request that may have crashed an engine core.
    """
    if claim.live or claim.engine_crashes:
        return b""
    request = claim.request
    return hashlib.sha256(f"{request.endpoint} {request.defaults} ".encode() + request.body).digest()


class Copy(NamedTuple):
    """A request that waits for an answer, and its claim time on the monotonic clock."""

    claim: Claim
    arrived: float


class _KeptAnswer(NamedTuple):
    """A finished request and its prepared form, kept for copies claimed later."""

    answer: AnyInFlight
    prepared: Prepared
    size: int  # bytes, approximate


@dataclass(slots=True)
class _CopyGroup:
    """An original, the prepared form of its duplicates, and its waiting copies."""

    original: RequestKey | None  # None once it has ended
    prepared: Prepared
    answer: AnyInFlight | None = None
    failed: bool = False  # whether the original ended with an error
    copies: dict[RequestKey, Copy] = field(default_factory=dict)


class Duplicates:
    """Track the originals and copies of one engine core. Use from the event loop only."""

    def __init__(
        self,
        repeat: Callable[[AnyInFlight, Copy], None],
        start: Callable[[Prepared], None],
        suspects: set[Digest] | None = None,
    ) -> None:
        """Create an empty tracker.

        `repeat` gives a copy the answer of a finished request; `start` runs a request. `suspects`
        are the digests that ran when earlier cores of this worker crashed and have not been
        answered since.
        """
        self._repeat = repeat
        self._start = start
        self._suspects: set[Digest] = set() if suspects is None else suspects
        self._groups: dict[Digest, _CopyGroup] = {}
        self._items: dict[RequestKey, Prepared] = {}  # requests in flight that have a digest
        self._waiting = 0  # copies
        self._kept: OrderedDict[Digest, _KeptAnswer] = OrderedDict()
        self._kept_bytes = 0

    def prepared(self, digest: Digest) -> Prepared | None:
        """Return the prepared form of a running or finished request with this digest, or None.

        It only reads, so the preparation thread may call it.
        """
        known = self._groups.get(digest) or self._kept.get(digest)
        return None if known is None else known.prepared

    def take(self, item: Prepared, now: float) -> bool:
        """Return True if the request waits for another's answer, False if it must run.

        A request with published tokens must run, since its readers have seen the beginning. All
        duplicates of a suspect run until one is answered: one after another would crash as many
        cores.
        """
        if not item.digest:
            return False
        key = item.claim.key
        self._items[key] = item
        digest = _digest_in_batch(item)
        if item.claim.checkpoint is not None or digest in self._suspects:
            self._groups.setdefault(digest, _CopyGroup(key, item))
            return False
        group = self._groups.get(digest)
        if group is None and digest not in self._kept:
            self._groups[digest] = _CopyGroup(key, item)
            return False
        if group is None:
            self._kept.move_to_end(digest)
            group = self._groups[digest] = _CopyGroup(None, item, self._kept[digest].answer)
            self._go_on_soon(digest)
        if group.answer is None and self._waiting >= MAX_COPIES:
            return False
        group.copies[key] = Copy(item.claim, now)
        self._waiting += 1
        return True

    def waiting(self) -> list[RequestKey]:
        """Return the keys of the waiting copies."""
        return [key for group in self._groups.values() for key in group.copies]

    def claim(self, key: RequestKey) -> Claim | None:
        """Return the claim of a waiting copy, or None."""
        group = self._group_of(key)
        copy = None if group is None else group.copies.get(key)
        return None if copy is None else copy.claim

    def answered(self, request: AnyInFlight, finished: Finished) -> None:
        """Record the answer of a request that ran."""
        item = self._items.get(request.claim.key)
        if item is None:
            return
        digest = _digest_in_batch(item)
        self._suspects.discard(digest)
        if (group := self._groups.get(digest)) is not None:
            group.answer = request
        tokens = sum(len(sequence.token_ids) for sequence in request.sequences)
        shown = len(request.claim.request.body) + len(finished.result.body)
        self._keep(digest, _KeptAnswer(request, item, _BYTES_OF_OBJECTS * shown + _BYTES_OF_TOKEN * tokens))
        self.leave(request.claim.key)

    def leave(self, key: RequestKey, failed: bool = False) -> None:
        """Remove a request that has ended; copies that waited for it continue."""
        group, item = self._group_of(key), self._items.pop(key, None)
        if group is None or item is None:
            return
        if group.copies.pop(key, None) is not None:
            self._waiting -= 1
        if group.original == key:
            group.original, group.failed = None, failed
            self._go_on_soon(_digest_in_batch(item))

    def suspect(self, keys: Iterable[RequestKey]) -> None:
        """Record the requests that ran when the core crashed."""
        if len(self._suspects) > _MOST_SUSPECTS:
            self._suspects.clear()
        self._suspects.update(_digest_in_batch(self._items[key]) for key in keys if key in self._items)

    def forget_batch(self, batch: str) -> None:
        """Drop the kept answers of a batch."""
        for digest in [digest for digest in self._kept if digest[0] == batch]:
            self._drop(digest)

    def _group_of(self, key: RequestKey) -> _CopyGroup | None:
        """Return the group of a request, or None. A group lasts as long as its original and
        copies.
        """
        item = self._items.get(key)
        return None if item is None else self._groups.get(_digest_in_batch(item))

    def _go_on_soon(self, digest: Digest) -> None:
        asyncio.get_running_loop().call_soon(self._go_on, digest)

    def _go_on(self, digest: Digest) -> None:
        """Process the next copy of an original that has ended.

        With an answer, answer one copy and reschedule, so that other tasks run in between. Without
        one, the copy becomes the original. After an error, all copies run.
        """
        group = self._groups[digest]
        copy = next(iter(group.copies.values()), None)
        if copy is None:
            del self._groups[digest]
        elif group.answer is not None:
            self.leave(copy.claim.key)
            self._go_on_soon(digest)
            self._repeat(group.answer, copy)
        else:
            group.original = copy.claim.key
            for key in list(group.copies) if group.failed else [copy.claim.key]:
                self._waiting -= 1
                self._start(dataclasses.replace(group.prepared, claim=group.copies.pop(key).claim))

    def _keep(self, digest: Digest, kept: _KeptAnswer) -> None:
        if digest in self._kept:
            self._drop(digest)
        self._kept[digest] = kept
        self._kept_bytes += kept.size
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, digest: Digest) -> None:
        self._kept_bytes -= self._kept.pop(digest).size


def _digest_in_batch(item: Prepared) -> Digest:
    return item.claim.key.batch, item.digest
