"""Duplicates: requests of one batch that must get the same answer. One of them, the original, runs;
its copies wait and get its answer.

A copy is held under a lease of its own, as any request, and has no slot in the engine. Where the
original ends without an answer, the first copy becomes the original.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jobs.protocol.requests import Claim, Finished, RequestKey
from jobs.protocol.validation import decode_body
from workers.replica.due_tokens import AnyInFlight
from workers.replica.pooling_in_flight import PreparedPooling
from workers.replica.prepared import Prepare, Prepared

MAX_KEPT_BYTES = 1 << 26
"""Memory that finished answers take at most, for copies that are claimed later."""

_BYTES_OF_OBJECTS = 10  # that a byte of JSON becomes, about
_ANSWERED_AT_ONCE = 32  # copies; between two groups the worker does other work

_Digest = tuple[str, bytes]  # batch, and that of the request


def prepare_with_digests(prepare: Prepare, claims: Sequence[Claim]) -> tuple[list[Prepared], list[Finished]]:
    """Prepare requests, and say which get the same answer."""
    prepared, errors = prepare(claims)
    for item in prepared:
        item.digest = digest_of(item)
    return prepared, errors


def digest_of(item: Prepared) -> bytes:
    """Return what requests of a batch have in common that get the same answer.

    It is empty for a live call, for a request that may have crashed an engine core, and for one
    whose answer depends on the seed that is stored with it.
    """
    claim = item.claim
    if claim.live or claim.engine_crashes or not (isinstance(item, PreparedPooling) or item.call.is_deterministic):
        return b""
    try:
        body = json.dumps(decode_body(claim.request.body), sort_keys=True)
    except RecursionError:
        return b""
    return hashlib.sha256(f"{claim.request.endpoint} {body}".encode()).digest()


class Copy(NamedTuple):
    """A request that waits for an answer, and when it was claimed, on the monotonic clock."""

    claim: Claim
    arrived: float


@dataclass(slots=True)
class _CopyGroup:
    """The original of some requests, how each of them is to run, and its copies."""

    original: RequestKey | None  # None: it has ended
    prepared: Prepared
    copies: dict[RequestKey, Copy] = field(default_factory=dict)
    answer: AnyInFlight | None = None


class Duplicates:
    """The originals and copies of one engine core. Used from the event loop only."""

    def __init__(self, repeat: Callable[[AnyInFlight, Copy], None], start: Callable[[Prepared], None]) -> None:
        """`repeat` gives a copy the answer of a request that has ended, `start` runs one."""
        self._repeat = repeat
        self._start = start
        self._groups: dict[_Digest, _CopyGroup] = {}
        self._digests: dict[RequestKey, _Digest] = {}  # of originals and copies
        self._kept: OrderedDict[_Digest, tuple[AnyInFlight, int]] = OrderedDict()
        self._kept_bytes = 0

    def take(self, item: Prepared, now: float) -> bool:
        """Answer a request at once, or have it wait, and return True; else it is to run.

        A request of which something was published runs: its readers have seen the beginning.
        """
        if not item.digest:
            return False
        key, may_copy = item.claim.key, item.claim.checkpoint is None
        digest = key.batch, item.digest
        if may_copy and digest in self._kept:
            self._kept.move_to_end(digest)
            self._repeat(self._kept[digest][0], Copy(item.claim, now))
            return True
        group = self._groups.get(digest)
        if group is None:
            self._groups[digest] = _CopyGroup(key, item)
        elif may_copy:
            group.copies[key] = Copy(item.claim, now)
        if group is None or may_copy:
            self._digests[key] = digest
        return group is not None and may_copy

    def waiting(self) -> list[RequestKey]:
        """Return the copies that wait."""
        return [key for group in self._groups.values() for key in group.copies]

    def claim(self, key: RequestKey) -> Claim | None:
        """Return the claim of a copy that waits."""
        digest = self._digests.get(key)
        copy = None if digest is None else self._groups[digest].copies.get(key)
        return None if copy is None else copy.claim

    def answered(self, request: AnyInFlight, finished: Finished) -> None:
        """Keep the answer of a request that has ended, if it is an original, for its copies."""
        digest = self._digests.get(request.claim.key)
        if digest is None:
            return
        self._groups[digest].answer = request
        self._keep(digest, request, _BYTES_OF_OBJECTS * (len(request.claim.request.body) + len(finished.result.body)))
        self.leave(request.claim.key)

    def leave(self, key: RequestKey) -> None:
        """Forget a request that has ended in some way; copies that waited for it go on."""
        digest = self._digests.pop(key, None)
        if digest is None:
            return
        group = self._groups[digest]
        if group.original == key:
            group.original = None
            asyncio.get_running_loop().call_soon(self._go_on, digest)
        else:
            del group.copies[key]

    def forget_batch(self, batch: str) -> None:
        """Drop what is kept of a batch that ends."""
        for digest in [digest for digest in self._kept if digest[0] == batch]:
            self._drop(digest)

    def _go_on(self, digest: _Digest) -> None:
        """Answer some copies of an original that has ended; without an answer, the first of them
        becomes the original.
        """
        group = self._groups[digest]
        first = list(itertools.islice(group.copies.values(), 1 if group.answer is None else _ANSWERED_AT_ONCE))
        if not first:
            del self._groups[digest]
        elif group.answer is None:
            claim = first[0].claim
            del group.copies[claim.key]
            group.original, group.prepared = claim.key, dataclasses.replace(group.prepared, claim=claim)
            self._start(group.prepared)
        else:
            for copy in first:
                self.leave(copy.claim.key)
                self._repeat(group.answer, copy)
            asyncio.get_running_loop().call_soon(self._go_on, digest)

    def _keep(self, digest: _Digest, request: AnyInFlight, size: int) -> None:
        if digest in self._kept:
            self._drop(digest)
        self._kept[digest] = request, size
        self._kept_bytes += size
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, digest: _Digest) -> None:
        self._kept_bytes -= self._kept.pop(digest)[1]
