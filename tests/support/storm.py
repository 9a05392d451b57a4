"""Many clients of streams at once, each with an answer that is known: fast and slow ones, some that
leave, and some that read on elsewhere when their server dies.
"""

import asyncio
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tests.support.event_reader import Event
from tests.support.stream_client import StreamAnswer

CHAT = "/v1/chat/completions"
SLOW = 0.1  # of those that stay, how many read nothing until the others have their answers
PLAIN = 0.1  # of those that leave, how many have a call that does not stream
_PAUSE = 0.1  # seconds before a server that is away is called again
_LOST = (OSError, EOFError)  # a connection that was refused, or ended before the answer did


@dataclass(frozen=True)
class StormQuestion:
    """A chat, the only right answer to it, and about how many tokens that has."""

    body: dict[str, Any]
    answer: str
    tokens: int


class Shown:
    """What a client has seen of one answer; each token must come once, and in order."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens = 0
        self.status: int | None = None  # once the answer has ended
        self.ended = False
        self._overlap = False
        self.faults: list[str] = []

    def add_chunk(self, event: Event) -> None:
        """Note an event of the call itself."""
        if event.value is None:
            self.ended = True
        elif "error" in event.value:
            self.faults.append(f"the stream has an error: {event.value}")
        else:
            self._add_choices(event.value)

    def _add_choices(self, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.status = 200 if choice["finish_reason"] is not None else self.status
        tokens = (chunk["usage"] or {}).get("completion_tokens", self.tokens)
        if tokens < self.tokens:
            self.faults.append(f"went back from {self.tokens} tokens to {tokens}")
        self.tokens = tokens

    def go_on(self) -> str:
        """The id of an event of `/v1/streams` after which everything is new.

        Only the last event may repeat tokens: a call shows them before its answer's end.
        """
        self._overlap = True
        return f"{self.tokens}-1"

    def add_event(self, event: Event) -> None:
        """Note an event of `/v1/streams`, which says where its tokens belong."""
        if event.value is None:
            self.ended = True
        elif "error" in event.value:
            self.faults.append(f"the stream has an error: {event.value}")
        else:
            self.status = event.value.get("status", self.status)
            for piece in event.value["choices"]:
                self._add_piece(piece)

    def _add_piece(self, piece: dict[str, Any]) -> None:
        known = (self.tokens - piece["token_offset"], len(self.text) - piece["text_offset"])
        if min(known) < 0 or (known != (0, 0) and not (self._overlap and self.status)):
            self.faults.append(f"after {self.tokens} tokens and {len(self.text)} characters: {piece}")
        self.tokens += len(piece["token_ids"]) - known[0]
        self.text += piece["text"][known[1] :]


class Storm:
    """Clients of `urls`, by turns, one for each question; every second one leaves."""

    def __init__(self, urls: list[str], questions: Iterable[StormQuestion], rng: random.Random) -> None:
        self._urls = urls
        self._questions = list(questions)
        self._rng = rng
        self._settled = asyncio.Event()
        self.begun = 0  # streams whose head has come
        self.leaving = 0  # clients that leave before that
        self.tokens = 0  # that came to clients, of all streams
        self.right = 0
        self.resumed = 0
        self.again = 0  # calls whose server died before it gave them a name
        self.left = 0
        self.faults: list[str] = []

    @property
    def expected_tokens(self) -> int:
        """About as many come to clients that stay."""
        return sum(question.tokens for question in self._questions[::2])

    @property
    def is_whole(self) -> bool:
        """Whether every client has its stream or has left."""
        return self.begun + self.leaving >= len(self._questions)

    async def run(self) -> None:
        """Return when every client has its answer or has left; what is wrong is in `faults`."""
        fast, slow = [], []
        for number, question in enumerate(self._questions):
            first = number % len(self._urls)
            urls = itertools.cycle(self._urls[first:] + self._urls[:first])
            if number % 2:
                fast.append(self._leave(next(urls), question))
            elif self._rng.random() < SLOW:
                slow.append(self._stay(urls, question, slow=True))
            else:
                fast.append(self._stay(urls, question, slow=False))
        async with asyncio.TaskGroup() as last:
            for client in slow:
                last.create_task(client)
            async with asyncio.TaskGroup() as first_ones:
                for client in fast:
                    first_ones.create_task(client)
            self._settled.set()

    async def _leave(self, url: str, question: StormQuestion) -> None:
        after = self._rng.randint(0, question.tokens)
        plain = self._rng.random() < PLAIN
        body = {**question.body, "stream": False} if plain else streamed(question)
        shown = Shown()
        try:
            async with StreamAnswer(url, CHAT, body) as answer:
                if plain or not after:
                    self.leaving += 1
                    return
                await answer.begin()
                self.begun += 1
                async for event in answer.events():
                    shown.add_chunk(event)
                    if shown.tokens >= after:
                        break
        except _LOST:
            pass
        self.left += 1
        if not question.answer.startswith(shown.text):
            self.faults.append(f"{shown.text!r} was shown of {question.answer!r}")

    async def _stay(self, urls: "itertools.cycle[str]", question: StormQuestion, slow: bool) -> None:
        shown = Shown()
        stream_id = await self._call(next(urls), question, shown, slow)
        while stream_id is None:
            self.again += 1
            await asyncio.sleep(_PAUSE)
            stream_id = await self._call(next(urls), question, shown, slow=False)
        self.resumed += not shown.ended
        while not shown.ended and not shown.faults:
            await self._resume(next(urls), stream_id, shown)
        self._judge(question, shown)

    async def _call(self, url: str, question: StormQuestion, shown: Shown, slow: bool) -> str | None:
        """Read to the end, or until the server dies. The stream's id; None if the call has none."""
        stream_id = None
        try:
            async with StreamAnswer(url, CHAT, streamed(question), slow=slow) as answer:
                await answer.begin()
                stream_id = answer.answer_headers["x-stream-id"]
                self.begun += 1
                async for event in answer.events():
                    before = shown.tokens
                    shown.add_chunk(event)
                    self.tokens += shown.tokens - before
                    if slow:
                        await self._settled.wait()
        except _LOST:
            pass
        return stream_id

    async def _resume(self, url: str, stream_id: str, shown: Shown) -> None:
        headers = {"last-event-id": shown.go_on()}
        try:
            async with StreamAnswer(url, f"/v1/streams/{stream_id}", headers=headers) as answer:
                await answer.begin()
                if answer.status == 503:
                    await asyncio.sleep(_PAUSE)
                elif answer.status != 200:
                    shown.faults.append(f"{stream_id} is answered {answer.status}: {(await answer.content()).decode()}")
                else:
                    async for event in answer.events():
                        shown.add_event(event)
        except _LOST:
            await asyncio.sleep(_PAUSE)

    def _judge(self, question: StormQuestion, shown: Shown) -> None:
        self.faults += shown.faults
        if (shown.text, shown.status, shown.ended) == (question.answer, 200, True):
            self.right += 1
        else:
            self.faults.append(f"{shown.text!r} with status {shown.status} instead of {question.answer!r}")

    def report(self) -> str:
        """One sentence for people."""
        return (
            f"{self.right} right, of them {self.resumed} read on after a cut and {self.again} called again;"
            f" {self.left + self.leaving} left"
        )


def streamed(question: StormQuestion) -> dict[str, Any]:
    """The body of a call that streams and says with each chunk how many tokens have come."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    return {**question.body, "stream": True, "stream_options": options}
