"""One slice of a batch's job: the hold on its batch."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jobs.batch.ending import clean_up
from jobs.batch.manifest import (
    Manifest,
    Superseded,
    end_fields,
    is_marked_cancelled,
    load_manifest,
    save_manifest,
    take_over,
)
from jobs.batch.webhook_notes import note_webhook
from jobs.errors import JobsError
from jobs.protocol.states import JOBS, State
from jobs.queue.batch_fields import BatchFields
from jobs.queue.request_queue import Queue
from jobs.store.leases import hold as held_folder
from jobs.store.storage import StoreError, sweep

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats of a driver, and between two checks of its slices' records."""
_RECENT_SECONDS = 0.1
"""A record that was read within this time is not read again before the manifest changes."""


class Stopping(JobsError):
    """This process ends; the ticker starts the job elsewhere."""

    retry = True


class Slice:
    """A job's hold on one batch.

    No other process works on its folder; `check_current` raises if the state or the generation
    changed.
    """

    def __init__(
        self,
        queue: Queue,
        batch: str,
        fields: BatchFields,
        manifest: Manifest,
        stopping: threading.Event,
        pause: Callable[[], None],
    ) -> None:
        self.queue = queue
        self.batch = batch
        self.fields = fields
        self.manifest = manifest
        self._stopping = stopping
        self._pause = pause
        self._lost = False
        self._read_at = 0.0  # monotonic seconds, of the record
        self._transitions = threading.Lock()

    @property
    def root(self) -> str:
        """Return the batch's folder."""
        return self.manifest.spec.root

    @property
    def generation(self) -> int:
        """Return the generation of this job; it rises when the batch goes to another process."""
        return self.fields.generation

    @property
    def state(self) -> str:
        """Return the state in Redis, as this job last read or set it."""
        return self.fields.state

    def check_current(self) -> None:
        """Yield to other batches; raise if this job must end.

        Raise `Superseded`, or `Stopping` if the process was ordered to end. Cheap, to be called
        often.
        """
        self._pause()
        if self._lost:
            raise Superseded(self.batch)
        if self._stopping.is_set():
            raise Stopping

    def record(self) -> BatchFields:
        """Return the current record. Raise `Superseded`, also if Redis came back without it."""
        self._read_at = time.monotonic()
        fields = self.queue.batch_fields(self.batch)
        if (fields.state, fields.generation) != (self.state, self.generation):
            self._lost = True
            raise Superseded(self.batch)
        return fields

    def note(self, fields: dict[str, Any]) -> None:
        """Set fields of the record. Raise `Superseded`."""
        self._transition(None, fields)

    def move(self, state: State, fields: dict[str, Any], stamp: str = "", done: bytes | None = None) -> None:
        """Move the state, in the manifest and then in Redis, there with the bitmap `done`, if
        given.

        Raise `Superseded`, also if early lines are of an input with another stamp.
        """
        self._enter(state)
        self._record_state(fields, stamp, done)

    def end(self, state: State) -> None:
        """Move to an end state, and remove all of the batch from Redis except its record."""
        self._enter(state)
        self._record_end()

    def end_again(self) -> None:
        """Restore the end in the manifest to Redis, which lost it or never got it.

        The files for further work are gone. A batch that was cancelled since ends as cancelled,
        with its results.
        """
        if self.manifest.state != "cancelled" and (self.state == "cancelling" or is_marked_cancelled(self.root)):
            if "cancelling" in self.fields.timestamps:
                self.manifest.timestamps["cancelling"] = self.fields.timestamps["cancelling"]
            self.manifest.end_cancelled()
            self._note_webhook()
            save_manifest(self.manifest)
        self.queue.remove_unfinished(self.batch)  # commits after the end would count
        self.note({"timestamps": self.manifest.timestamps})
        self._record_end()

    def discard_early_lines(self) -> None:
        """Remove every early line, finished or not. Raise `Superseded`."""
        if not self.queue.discard(self.batch, self.state, self.generation):
            self._lost = True
            raise Superseded(self.batch)

    def check_record(self) -> None:
        """Raise `Superseded` if the batch has moved on.

        The slice's next `check_current` then raises it too. Any thread may call this.
        """
        with self._transitions:
            self.record()

    def _enter(self, state: State) -> None:
        if time.monotonic() - self._read_at > _RECENT_SECONDS:
            self.record()
        self.manifest.enter(state)
        self._note_webhook()
        save_manifest(self.manifest)

    def _note_webhook(self) -> None:
        note_webhook(self.queue, self.batch, self.manifest.spec, self.manifest.state)

    def _record_end(self) -> None:
        self._record_state(end_fields(self.manifest))
        clean_up(self.queue, self.batch)

    def _record_state(self, fields: dict[str, Any], stamp: str = "", done: bytes | None = None) -> None:
        state = self.manifest.state
        times = {**fields.get("timestamps", {}), state: self.manifest.timestamps[state]}
        self._transition(state, {"problem": "", **fields, "timestamps": times}, stamp, done)

    def _transition(
        self, state: str | None, fields: dict[str, Any], stamp: str = "", done: bytes | None = None
    ) -> None:
        with self._transitions:
            known = self.state
            if not self.queue.transition(self.batch, [known], state or known, fields, self.generation, stamp, done):
                self._lost = True
                raise Superseded(self.batch)
            self.fields = self.fields.changed({**fields, "state": state or known})


@contextlib.contextmanager
def hold(
    queue: Queue,
    batch: str,
    driver: str | None,
    stopping: threading.Event,
    pause: Callable[[], None],
    patience: float,
) -> Iterator[Slice]:
    """Hold a batch for one slice of its job, which ends when `stopping` is set.

    Raise `Superseded` if the batch has no job, if its record names another driver (None: any is
    accepted), or if its manifest names the record of another server, which took over the folder;
    `Busy` if another process holds it.
    """
    fields = queue.batch_fields(batch)
    if fields.state not in JOBS or driver not in (None, fields.driver):
        raise Superseded(batch)
    with held_folder(queue, fields.root, patience):
        manifest = load_manifest(fields.root)
        if manifest is None or manifest.batch_id != batch:
            raise StoreError(f"the manifest of {batch} is gone from {fields.root}")
        if manifest.owner != fields.owner:
            raise Superseded(batch)
        if manifest.generation < fields.generation:
            manifest.generation = fields.generation
            save_manifest(manifest)
        take_over(manifest)
        sweep(fields.root)
        held = Slice(queue, batch, fields, manifest, stopping, pause)
        changes: dict[str, Any] = {"lost_since": 0.0} if fields.lost_since else {}
        if manifest.generation > fields.generation:  # Redis lost data
            changes["generation"] = manifest.generation
        if changes:
            held.note(changes)
        else:
            held.record()
        yield held
