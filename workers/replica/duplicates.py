"""Duplicates: requests of one batch that must get the same answer. One of them, the original, runs;
its copies wait and get its answer.

A copy is held under a lease of its own, as any request, and has no slot in the engine. Where the
original ends without an answer, the first copy becomes the original. Where it failed, all copies
run: most often each fails in the same way, and one after the other would take many times as long.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jobs.protocol.requests import Claim, Finished, RequestKey
from jobs.protocol.validation import decode_body
from workers.replica.due_tokens import AnyInFlight
from workers.replica.pooling_in_flight import PreparedPooling
from workers.replica.prepared import Prepare, Prepared

MAX_KEPT_BYTES = 1 << 24
"""Memory that finished answers take at most, for copies that are claimed later."""

MAX_COPIES = 128
"""Copies that wait for originals that run; more of the same run beside them. They hold up no other
work, and their answers add no more than so many to the results in Redis.
"""

_BYTES_OF_OBJECTS = 10  # that a byte of JSON becomes, about
_BYTES_OF_TOKEN = 200  # the same of a token, shown or not
_MOST_SUSPECTS = 4096  # beyond which all are forgotten

Digest = tuple[str, bytes]
"""Of a batch the id, and of its request what `digest_of` returns."""


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
        fields = sorted(decode_body(claim.request.body).items())  # within them templates and grammars see the order
        body = json.dumps(fields)
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
    answer: AnyInFlight | None = None
    failed: bool = False  # whether the original ended with an error
    copies: dict[RequestKey, Copy] = field(default_factory=dict)


class Duplicates:
    """The originals and copies of one engine core. Used from the event loop only."""

    def __init__(
        self,
        repeat: Callable[[AnyInFlight, Copy], None],
        start: Callable[[Prepared], None],
        suspects: set[Digest] | None = None,
    ) -> None:
        """`repeat` gives a copy the answer of a request that has ended, `start` runs one.

        `suspects`: what ran when earlier cores of this worker crashed, and was not answered since.
        """
        self._repeat = repeat
        self._start = start
        self._suspects: set[Digest] = set() if suspects is None else suspects
        self._groups: dict[Digest, _CopyGroup] = {}
        self._digests: dict[RequestKey, Digest] = {}  # of requests in flight
        self._waiting = 0  # copies
        self._kept: OrderedDict[Digest, tuple[AnyInFlight, int]] = OrderedDict()
        self._kept_bytes = 0

    def take(self, item: Prepared, now: float) -> bool:
        """Have a request wait for an answer and return True; else it is to run.

        One of which something was published runs: its readers have seen the beginning. So do all
        suspects, as long as none is answered: one after the other would crash as many cores.
        """
        if not item.digest:
            return False
        key = item.claim.key
        digest = self._digests[key] = key.batch, item.digest
        if item.claim.checkpoint is not None or digest in self._suspects:
            self._groups.setdefault(digest, _CopyGroup(key, item))
            return False
        group = self._groups.get(digest)
        if group is None and digest not in self._kept:
            self._groups[digest] = _CopyGroup(key, item)
            return False
        if group is None:
            self._kept.move_to_end(digest)
            group = self._groups[digest] = _CopyGroup(None, item, self._kept[digest][0])
            self._go_on_soon(digest)
        if group.answer is None and self._waiting >= MAX_COPIES:
            return False
        group.copies[key] = Copy(item.claim, now)
        self._waiting += 1
        return True

    def waiting(self) -> list[RequestKey]:
        """Return the copies that wait."""
        return [key for group in self._groups.values() for key in group.copies]

    def claim(self, key: RequestKey) -> Claim | None:
        """Return the claim of a copy that waits."""
        group = self._group_of(key)
        copy = None if group is None else group.copies.get(key)
        return None if copy is None else copy.claim

    def answered(self, request: AnyInFlight, finished: Finished) -> None:
        """Note the answer of a request that ran."""
        digest = self._digests.get(request.claim.key)
        if digest is None:
            return
        self._suspects.discard(digest)
        if (group := self._groups.get(digest)) is not None:
            group.answer = request
        tokens = sum(len(sequence.token_ids) for sequence in request.sequences)
        shown = len(request.claim.request.body) + len(finished.result.body)
        self._keep(digest, request, _BYTES_OF_OBJECTS * shown + _BYTES_OF_TOKEN * tokens)
        self.leave(request.claim.key)

    def leave(self, key: RequestKey, failed: bool = False) -> None:
        """Forget a request that has ended in some way; copies that waited for it go on."""
        group, digest = self._group_of(key), self._digests.pop(key, None)
        if group is None or digest is None:
            return
        if group.copies.pop(key, None) is not None:
            self._waiting -= 1
        if group.original == key:
            group.original, group.failed = None, failed
            self._go_on_soon(digest)

    def suspect(self, keys: Iterable[RequestKey]) -> None:
        """Note requests that ran when the core crashed."""
        if len(self._suspects) > _MOST_SUSPECTS:
            self._suspects.clear()
        self._suspects.update(self._digests[key] for key in keys if key in self._digests)

    def forget_batch(self, batch: str) -> None:
        """Drop what is kept of a batch."""
        for digest in [digest for digest in self._kept if digest[0] == batch]:
            self._drop(digest)

    def _group_of(self, key: RequestKey) -> _CopyGroup | None:
        """Return the group of a request; it lasts as long as its original and its copies."""
        digest = self._digests.get(key)
        return None if digest is None else self._groups.get(digest)

    def _go_on_soon(self, digest: Digest) -> None:
        asyncio.get_running_loop().call_soon(self._go_on, digest)

    def _go_on(self, digest: Digest) -> None:
        """Answer one copy of an original that has ended, then let others work; without an answer
        the copy becomes the original, and after an error the others run beside it.
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

    def _keep(self, digest: Digest, request: AnyInFlight, size: int) -> None:
        if digest in self._kept:
            self._drop(digest)
        self._kept[digest] = request, size
        self._kept_bytes += size
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._drop(next(iter(self._kept)))

    def _drop(self, digest: Digest) -> None:
        self._kept_bytes -= self._kept.pop(digest)[1]
