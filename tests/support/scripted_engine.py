"""An engine without a model: every sequence gets the tokens that a script gives it, as many per
step as the test says.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from workers.engine.messages.core import EngineRequest, Finish, SamplingParams, Stats, StepOutput, TokenLogprobs

CACHED_TOKENS = 2
DEVICE_SECONDS = 0.25  # of each sequence


class ScriptedEngine:
    """`script(prompt, sampling)` gives the whole output of a sequence; `sampling` ends it as an
    engine would.

    The log probability of a token says which it is: its id, negative, plus a hundredth of its
    choice.
    """

    def __init__(self, script: Callable[[list[int], SamplingParams], list[int]]) -> None:
        self._script = script
        self.running: dict[int, EngineRequest] = {}
        self.added: list[EngineRequest] = []
        self.failing: dict[int, str] = {}
        self.failure = Finish.ERROR  # of the failing
        self.info = SimpleNamespace(dtype="float16")
        self._positions: dict[int, int] = {}

    def add(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            assert request.request_id not in self.running
            self.running[request.request_id] = request
            self._positions[request.request_id] = len(request.output_token_ids)
        self.added += requests

    def abort(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def step(self, counts: Callable[[EngineRequest], int] = lambda request: 1) -> StepOutput:
        """Gives each sequence `counts` of it more tokens, or fewer at its end."""
        output = StepOutput(0, [], [], [], [], [], [], Stats())
        for request in list(self.running.values()):
            count = counts(request)
            if count or request.request_id in self.failing:
                self._run(request, count, output)
        return output

    def _run(self, request: EngineRequest, count: int, output: StepOutput) -> None:
        if request.pooling is not None and request.request_id not in self.failing:
            output.pooled[request.request_id] = pooled(request)
            self._note(request, Finish.STOP, [], output)
            return
        start, sampling = self._positions[request.request_id], request.sampling
        tokens = self._script(request.prompt_token_ids, sampling)[: sampling.max_tokens][start : start + count]
        stop = next((i for i, token in enumerate(tokens) if token in sampling.stop_token_ids), None)
        tokens = tokens if stop is None else tokens[: stop + 1]
        finish = Finish.RUNNING if stop is None else Finish.STOP
        if stop is None and start + len(tokens) >= sampling.max_tokens:
            finish = Finish.LENGTH
        if request.request_id in self.failing:
            finish, tokens = self.failure, []
            output.errors[request.request_id] = self.failing[request.request_id]
        if start == len(request.output_token_ids) and sampling.prompt_logprobs >= 0:
            output.prompt_logprobs[request.request_id] = [
                logprobs_of(token, sampling.prompt_logprobs) for token in request.prompt_token_ids[1:]
            ]
        if sampling.logprobs >= 0:
            output.logprobs[request.request_id] = [
                logprobs_of(token, sampling.logprobs, sampling.choice) for token in tokens
            ]
        self._note(request, finish, tokens, output)

    def _note(self, request: EngineRequest, finish: Finish, tokens: list[int], output: StepOutput) -> None:
        start = self._positions[request.request_id]
        output.request_ids.append(request.request_id)
        output.counts.append(len(tokens))
        output.token_ids += tokens
        output.finish.append(finish)
        if finish or request.stop_strings:
            output.device_seconds[request.request_id] = DEVICE_SECONDS
        output.stop_token.append(tokens[-1] if tokens and finish is Finish.STOP else -1)
        output.cached_tokens.append(CACHED_TOKENS if start == len(request.output_token_ids) else 0)
        self._positions[request.request_id] = start + len(tokens)
        if finish:
            del self.running[request.request_id]


def pooled(request: EngineRequest) -> bytes:
    """What the engine gives for an input: how many tokens it has, the first one, and where a second
    text begins; with `token_embed` each token twice.
    """
    tokens = request.prompt_token_ids
    assert request.pooling is not None
    rows = request.pooling.task == "token_embed"
    numbers = [token for token in tokens for _ in (0, 1)] if rows else [len(tokens), tokens[0], request.second_text]
    return struct.pack(f"<{len(numbers)}f", *numbers)


def logprobs_of(token: int, top: int, choice: int = 0) -> TokenLogprobs:
    """What the engine says of a token."""
    return TokenLogprobs([token, *range(top)], [-token + choice / 100, *(-1.0 - i for i in range(top))], token + 1)
