"""Work whose every answer is known: batches of several tenants, some of them of embeddings, and
live calls by the official client.
"""

import contextlib
import json
import random
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx
import openai
import redis

from jobs.batch.client import BatchRecord, BatchSpec, StoreError, cancel_batch, create_batch, get_batch
from jobs.queue import keys
from jobs.queue.scripts import QueueUnavailable
from tests.chaos.embeddings import MODEL as EMBEDDING_MODEL
from tests.chaos.embeddings import EmbeddedTexts
from tests.chaos.questions import AskedQuestion, Questions, text_of
from tests.support.fleet import LocalFleet

TENANTS = ("red", "green", "blue")
SIZES = (100, 500)
SIZES_OF_EMBEDDINGS = (2000, 6000)
EMBEDDING_BATCHES = 4  # every so many batches one is of embeddings
BATCHES_AT_ONCE = 3
LIVE_CALLERS = 3
CANCELLED = 5  # every so many batches one is cancelled at some line
LEAVING = 0.1  # of the live callers' calls, that they hang up in
_ORDER = {"validating": 0, "in_progress": 1, "finalizing": 2, "cancelling": 2, "completed": 3, "cancelled": 3}
_LOOK_SECONDS = 0.25
_PAUSE = 0.2


@dataclass
class SubmittedBatch:
    """One file that was submitted, and what was seen of it."""

    source: Path
    output: Path
    spec: BatchSpec
    questions: dict[str, AskedQuestion]  # by custom_id, in the order of the lines
    cancel_at: int | None  # lines after which it is cancelled
    id: str | None = None
    record: BatchRecord | None = None
    life: tuple[int, str] = (0, "")  # `Load.lives`, and Redis' history, when the record was read
    lost: bool = False  # its folder was removed: it must end all the same
    gone: bool = False  # and Redis came back empty: nothing is left of it


@dataclass
class LiveAnswers:
    """What became of the live calls."""

    right: int = 0
    resumed: int = 0  # cut, and read to the end from the request's own stream
    again: int = 0  # cut or refused, and called again
    left: int = 0  # hung up by the client
    wrong: list[str] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)


class ChaosLoad:
    """Hands in batches so that some are always under way, follows them, and makes live calls, until
    `stop`; all in threads.
    """

    refusals: tuple[str, ...] = ("queue_unavailable", "model_loading", "no_worker")
    """Codes of errors that a live call may end with."""
    padding = ""
    """Behind each line of a batch of texts."""

    def __init__(self, fleet: LocalFleet, texts: EmbeddedTexts, rng: random.Random) -> None:
        self._fleet = fleet
        self._texts = texts
        self._rng = rng
        self._questions = Questions()
        self._stopping = threading.Event()
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._feed, name="feeder", daemon=True)]
        self._threads += [
            threading.Thread(target=self._call, args=(random.Random(rng.random()),), daemon=True)
            for _ in range(LIVE_CALLERS)
        ]
        self._lock = threading.Lock()
        self.batches: list[SubmittedBatch] = []
        self.live = LiveAnswers()
        self.faults: list[str] = []  # what was seen on the way and must not be
        # How often Redis began or ended to lose something; even while it loses nothing
        self.lives = 0
        self._lost_totals = (0, 0)
        # How often a file store that is no folder ceased or began to answer
        self.outages = 0
        self._store = threading.Lock()  # held while something of the load is in the file store
        self._store_is_away = False

    def __enter__(self) -> "ChaosLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._ending.set()
        for thread in self._threads:
            thread.join(60)

    @property
    def finished(self) -> int:
        """Lines that have their result, as the records say."""
        return sum(batch.record.completed + batch.record.failed for batch in self.batches if batch.record is not None)

    @property
    def handed_in(self) -> int:
        return sum(len(batch.questions) for batch in self.batches)

    @property
    def live_answers(self) -> int:
        return self.live.right

    @property
    def unfinished(self) -> list[str]:
        """Batches that have not ended, as last seen."""
        return [f"{batch.spec.root}: {batch.record}" for batch in self.batches if self._is_unfinished(batch)]

    @property
    def input_folders(self) -> list[Path]:
        """Those of the batches that have not ended, and of the next one."""
        numbers = [number for number, batch in enumerate(self.batches) if self._is_unfinished(batch)]
        return [self._folder(number) for number in (*numbers, len(self.batches))]

    def stop(self) -> None:
        """No more batches and calls; those that are there go on to their end."""
        self._stopping.set()

    def has_ended(self) -> bool:
        """Whether every batch has ended and every caller has its answer."""
        callers = self._threads[1:]
        return self._stopping.is_set() and not self.unfinished and not any(thread.is_alive() for thread in callers)

    def token_totals(self) -> tuple[int, int]:
        """Tokens generated and delivered, over all lives of Redis, as far as it got reports of
        them.
        """
        generated, delivered = self._fleet.queue.token_totals()
        return self._lost_totals[0] + generated, self._lost_totals[1] + delivered

    def note_loss(self) -> None:
        """Redis is about to go back, and what it says of batches with it, or has just done so: what
        was read before says nothing now.
        """
        self.lives += 1

    def take_store_away(self) -> bool:
        """Unmount the file store, as far as anything can tell; False if it is away already."""
        with self._store:
            if self._store_is_away:
                return False
            self._store_is_away = True
            self._fleet.store.rename(self._away)
            self._fleet.store.mkdir()
            return True

    def bring_store_back(self) -> None:
        """Mount it again. Nothing may have been written meanwhile."""
        with self._store:
            left = sorted(path.name for path in self._fleet.store.iterdir())
            if left:
                self.faults.append(f"written where the file store was not mounted: {left}")
            shutil.rmtree(self._fleet.store)
            self._away.rename(self._fleet.store)
            self._store_is_away = False

    def lose_folder(self, rng: random.Random) -> str | None:
        """Remove the folder of a batch under way; None if there is none."""
        with self._store:
            running = [one for one in self.batches if one.record is not None and not one.record.ended and not one.lost]
            if self._store_is_away or not running:
                return None
            batch = rng.choice(running)
            batch.lost = True
            trash = self._fleet.folder / f"trash-{batch.source.parent.name}"
            Path(batch.spec.root).rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
            return batch.source.parent.name

    @property
    def _away(self) -> Path:
        return self._fleet.folder / "unmounted"

    def note_empty(self) -> None:
        """The same, where it loses everything; workers that live on will report to the next one all
        their tokens again.
        """
        generated, delivered = self.token_totals()
        reported_again = sum(
            int(self._fleet.client.get(keys.counted(worker.id)) or 0) for worker in self._fleet.queue.workers()
        )
        self._lost_totals = generated - reported_again, delivered
        self.note_loss()

    def _feed(self) -> None:
        while not self._ending.wait(_LOOK_SECONDS):
            if not self._stopping.is_set() and len(self.unfinished) < BATCHES_AT_ONCE:
                self.batches.append(self._write_batch())
            for batch in self.batches:
                if self._is_unfinished(batch):
                    with contextlib.suppress(redis.RedisError, QueueUnavailable, KeyError), self._store:
                        self._look_at(batch)

    def _write_batch(self) -> SubmittedBatch:
        number = len(self.batches)
        folder = self._folder(number)
        folder.mkdir()
        source, output = folder / "requests.jsonl", folder / "results.jsonl"
        is_of_texts = number % EMBEDDING_BATCHES == EMBEDDING_BATCHES // 2
        supply = self._texts if is_of_texts else self._questions
        questions = {}
        padding = self.padding if is_of_texts else ""
        with source.open("w") as file:
            for line in range(self._rng.randint(*(SIZES_OF_EMBEDDINGS if is_of_texts else SIZES))):
                question = supply.draw(self._rng)
                custom_id = f"{number}-{line}-{question.id}"
                request = {
                    "custom_id": custom_id,
                    "method": "POST",
                    "url": question.url,
                    "body": question.body,
                }
                file.write(f"{json.dumps(request)}{padding}\n")
                questions[custom_id] = question
        root = self._fleet.store / "batches" / folder.name
        spec = BatchSpec(
            input=str(source),
            root=str(root),
            output=str(output),
            tenant=TENANTS[number % len(TENANTS)],
            models=(EMBEDDING_MODEL if is_of_texts else "demo",),
        )
        cancel_at = self._rng.randrange(len(questions)) if number % CANCELLED == 1 else None
        return SubmittedBatch(source, output, spec, questions, cancel_at)

    def _folder(self, number: int) -> Path:
        return self._fleet.folder / f"batch-{number}"

    @staticmethod
    def _is_unfinished(batch: SubmittedBatch) -> bool:
        return not batch.gone and (batch.record is None or not batch.record.ended)

    def _look_at(self, batch: SubmittedBatch) -> None:
        """Hands the batch in until that is known to have worked; then follows its record, which
        only moves forward.
        """
        if self._store_is_away:
            return
        life = (self.lives, self._fleet.history())
        outages = self.outages
        if batch.id is None:
            batch.id = self._submit(batch)
            if batch.id is None:
                return
        try:
            record = get_batch(self._fleet.client, batch.id, retry_seconds=0)
        except KeyError:
            batch.gone = batch.lost
            return
        before, batch.record = batch.record, record
        is_readable = outages == self.outages and outages % 2 == 0
        if before is not None and is_readable and not batch.lost:
            self._compare_stored(batch, before, record)
        is_same = batch.life == life == (self.lives, self._fleet.history())
        if before is not None and is_readable and is_same and life[0] % 2 == 0:
            self._compare(batch, before, record)
        batch.life = life
        if batch.cancel_at is not None and record.state == "in_progress" and record.completed >= batch.cancel_at:
            self._cancel(batch.id)

    def _submit(self, batch: SubmittedBatch) -> str | None:
        """Return the id of a new batch, None where the call has to be made again."""
        try:
            return create_batch(self._fleet.client, batch.spec).id
        except StoreError:
            return None

    def _cancel(self, batch_id: str) -> None:
        cancel_batch(self._fleet.client, batch_id)

    def _compare_stored(self, batch: SubmittedBatch, before: BatchRecord, now: BatchRecord) -> None:
        """What is on disk no loss of Redis takes back."""
        then, later = ((one.stored_completed, one.stored_failed) for one in (before, now))
        if later[0] < then[0] or later[1] < then[1] or sum(later) > len(batch.questions):
            self.faults.append(f"{batch.source}: counts of what is on disk went from {then} to {later}")

    def _compare(self, batch: SubmittedBatch, before: BatchRecord, now: BatchRecord) -> None:
        if _ORDER[now.state] < _ORDER[before.state]:
            self.faults.append(f"{batch.source}: went back from {before.state} to {now.state}")
        if now.completed < before.completed or now.failed < before.failed:
            self.faults.append(
                f"{batch.source}: counts fell from {before.completed}/{before.failed} to {now.completed}/{now.failed}"
            )

    def _call(self, rng: random.Random) -> None:
        while not self._stopping.is_set():
            question = self._questions.draw(rng)
            leaves = rng.random() < LEAVING
            while not self._answered(question, leaves) and not self._ending.wait(_PAUSE):
                pass

    def _answered(self, question: AskedQuestion, leaves: bool) -> bool:
        """One call; whether it brought the whole answer, or as much as was wanted.

        What it showed of it must be right in any case.
        """
        texts: list[str] = []
        stream_id = None
        try:
            with openai.OpenAI(
                base_url=f"{self._fleet.api_url}/v1", api_key="none", max_retries=0, timeout=120
            ) as client:
                response = client.chat.completions.with_raw_response.create(
                    model="demo", messages=question.body["messages"], stream=True, extra_body=question.body
                )
                stream_id = response.headers["x-stream-id"]
                ended = False
                stream = response.parse()
                for chunk in stream:
                    texts.append(text_of(chunk.choices[0].delta.model_dump()))
                    ended = ended or chunk.choices[0].finish_reason is not None
                    if leaves:
                        stream.close()
                        return self._has_left(question, "".join(texts))
                if not ended:
                    raise ConnectionError("the stream ended early")
        except Exception as error:
            return self._is_known_refusal(error, question, "".join(texts), stream_id)
        self._compare_text(question, "".join(texts), whole=True)
        with self._lock:
            self.live.right += 1
        return True

    def _has_left(self, question: AskedQuestion, text: str) -> bool:
        self._compare_text(question, text, whole=False)
        with self._lock:
            self.live.left += 1
        return True

    def _is_known_refusal(self, error: Exception, question: AskedQuestion, text: str, stream_id: str | None) -> bool:
        """A call may end with its API process, or without Redis; whether the rest of its answer
        could be read afterwards.
        """
        self._compare_text(question, text, whole=False)
        name = f"{getattr(error, 'status_code', '')} {type(error).__name__}: {str(error)[:100]}".strip()
        expected = isinstance(error, openai.APIConnectionError | httpx.TransportError | ConnectionError)
        expected = expected or (isinstance(error, openai.APIError) and getattr(error, "code", None) in self.refusals)
        with self._lock:
            self.live.refusals[name] = self.live.refusals.get(name, 0) + 1
            if not expected:
                self.live.wrong.append(f"a call ended with {name}")
        rest = None if stream_id is None else self._read_stream(stream_id)
        with self._lock:
            if rest is None:
                self.live.again += 1
                return False
            self.live.resumed += 1
            self.live.right += 1
        self._compare_text(question, rest, whole=True)
        self._compare_resumed(question, text, rest)
        return True

    def _read_stream(self, stream_id: str) -> str | None:
        """The whole text from the request's own stream, on the API process that comes next; None if
        it is not to be had.
        """
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not self._ending.is_set():
            try:
                text = self._read_events(f"{self._fleet.api_url}/v1/streams/{stream_id}")
            except httpx.TransportError:
                time.sleep(_PAUSE)
                continue
            return text
        return None

    @staticmethod
    def _read_events(url: str) -> str | None:
        texts, ended = [], False
        with httpx.stream("GET", url, timeout=60) as response:
            if response.status_code != 200:
                return None
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                texts += [choice["text"] for choice in event.get("choices", [])]
                ended = ended or event.get("status") == 200
        return "".join(texts) if ended else None

    def _compare_text(self, question: AskedQuestion, text: str, whole: bool) -> None:
        if not (question.fits(text) if whole else question.may_begin(text)):
            with self._lock:
                self.live.wrong.append(f"{question.id}: {text!r} instead of {question.answer or question.body!r}")

    def _compare_resumed(self, question: AskedQuestion, text: str, rest: str) -> None:
        """What was shown before a cut is how the answer begins."""
        if not rest.startswith(text):
            with self._lock:
                self.live.wrong.append(f"{question.id}: {text!r} was shown of {rest!r}")
