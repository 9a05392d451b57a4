"""A worker without a model: it speaks the queue's protocol over a real Redis and answers as the
test says.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable

from jobs.protocol.endpoint import AnswerHead
from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.requests import Claim, Delta, Finished, ParsedDelta, RequestKey, TokenChunk
from jobs.protocol.results import (
    ApiError,
    Choice,
    ParsedMessage,
    Result,
    ToolCall,
    Usage,
    encode_json,
    new_request_id,
)
from jobs.protocol.validation import parse_call
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue

Answer = Iterable[str | ParsedDelta] | ApiError | Result
FINGERPRINT = "fp_scripted"
MODEL = "scripted"
_RENEWAL_SECONDS = 5.0  # of its registration, which lasts for 90 s


class ScriptedWorker:
    """Takes live calls in a thread and answers each with what `script(claim)` gives: pieces of
    text, what a parser made of pieces of a text, an error, or a result.

    Between two pieces it waits for `step`, if that was set; `cancelled` names calls whose lease was
    lost.
    """

    def __init__(
        self,
        queue: Queue,
        script: Callable[[Claim], Answer],
        models: tuple[str, ...] = (MODEL,),
        tasks: tuple[str, ...] = ("generate",),
    ) -> None:
        self.queue = queue
        self.id = f"scripted-{uuid.uuid4().hex[:8]}"
        self.step: threading.Semaphore | None = None
        self.cancelled: list[RequestKey] = []
        self.claims: list[Claim] = []
        self._models = list(models)
        self._tasks = tasks
        self._script = script
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "ScriptedWorker":
        record = WorkerRecord(self.id, self._models, "ready", 128, time.time(), "host", 1, tasks=self._tasks)
        self.queue.register_worker(record)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()
        self.queue.remove_worker(self.id)

    def _run(self) -> None:
        seq, last_id, renewed = 0, "0-0", time.monotonic()
        answering: list[threading.Thread] = []
        while not self._stopping.is_set():
            seq += 1
            if time.monotonic() - renewed > _RENEWAL_SECONDS:
                renewed = time.monotonic()
                self.queue.renew(self.id, [])
            for claim in self.queue.claim(self.id, seq, 16, models=self._models):
                self.claims.append(claim)
                answering.append(threading.Thread(target=self._answer, args=(claim,)))
                answering[-1].start()
            for message in self.queue.control_messages(self.id, last_id, 0.05):
                last_id = message.id
        for thread in answering:
            thread.join()

    def _answer(self, claim: Claim) -> None:
        reply_to = claim.request.reply_to
        answer = self._script(claim)
        if isinstance(answer, ApiError | Result):
            result = answer.result(new_request_id()) if isinstance(answer, ApiError) else answer
            self.queue.commit(self.id, [Finished(claim.key, claim.fence, result, None, reply_to)])
            return
        self.queue.publish(self.id, [Delta(claim.key, claim.fence, 0, [], reply_to, True, FINGERPRINT)])
        text, index = "", 0
        parsed: list[ParsedDelta] = []
        for piece in answer:
            while self.step is not None and not self.step.acquire(timeout=0.02):
                if self._stopping.is_set() or self.queue.renew(self.id, [(claim.key, claim.fence)]):
                    self.cancelled.append(claim.key)
                    return
            if isinstance(piece, ParsedDelta):
                parsed.append(piece)
            shown = "?" if parsed else piece
            chunk = TokenChunk(0, index, [index], shown, len(text), parsed=parsed[-1:] or None, prompt_tokens=7)
            if self.queue.publish(self.id, [Delta(claim.key, claim.fence, index + 1, [chunk], reply_to)]):
                self.cancelled.append(claim.key)
                return
            text, index = text + shown, index + 1
        usage = Usage(7, index, 3)
        endpoint = ENDPOINTS[claim.request.endpoint]
        tier = parse_call(endpoint.url, json.loads(claim.request.body)).service_tier
        head = AnswerHead(endpoint.new_id(), claim.request.model, int(claim.request.created), FINGERPRINT, tier)
        message = _message(parsed) if parsed else None
        reason = "tool_calls" if message is not None and message.tool_calls else "stop"
        body = endpoint.body(head, [Choice(0, text, reason, message=message)], usage)
        result = Result(200, encode_json(body), usage, new_request_id())
        self.queue.commit(self.id, [Finished(claim.key, claim.fence, result, None, reply_to)])


def _message(parsed: list[ParsedDelta]) -> ParsedMessage:
    """What the deltas of an answer make up."""
    calls: dict[int, ToolCall] = {}
    for piece in (piece for delta in parsed for piece in delta.tool_calls):
        known = calls.get(piece.index, ToolCall(piece.id or "", piece.name or "", ""))
        calls[piece.index] = ToolCall(known.id, known.name, known.arguments + piece.arguments)
    content = "".join(delta.content for delta in parsed)
    reasoning = "".join(delta.reasoning for delta in parsed)
    return ParsedMessage(content if content or not calls else None, reasoning or None, list(calls.values()))
