"""Find the requests of a retired step for which the model or their parameters gave no token."""

import math
from collections.abc import Iterator

import numpy as np

from workers.engine.messages.core import ALL_EXCLUDED, Finish
from workers.engine.messages.step import NO_TOKEN, StepResult
from workers.engine.scheduling.request import RequestState
from workers.engine.scheduling.step_builder import StepBuilder


def unusable(launched: StepBuilder, result: StepResult) -> Iterator[tuple[RequestState, Finish, str]]:
    """Yield each request that cannot go on, with its end and the reason; one may come twice.

    A request with a guide and without a token is left to its guide.
    """
    for request, scores in zip(launched.scored, result.prompt_logprobs, strict=True):
        if any(math.isnan(score.logprobs[0]) for score in scores):
            yield request, Finish.NOT_FINITE, "the logits for the prompt"
    for index in np.flatnonzero(result.tokens < 0).tolist():
        request = launched.sampling[index]
        excluded = request.guide is not None or request.sampling.excludes_tokens
        if result.tokens[index] != NO_TOKEN or not excluded:
            yield request, Finish.NOT_FINITE, _of_output(request)
        elif request.guide is None:
            yield request, Finish.INVALID, ALL_EXCLUDED
    for index, logprobs in result.logprobs.items():
        if math.isnan(logprobs.logprobs[0]):
            yield launched.sampling[index], Finish.NOT_FINITE, _of_output(launched.sampling[index])
    for request, pooled in zip(launched.sampling, result.pooled, strict=False):
        if not pooled:
            yield request, Finish.NOT_FINITE, "the numbers for the text"


def _of_output(request: RequestState) -> str:
    return f"the logits for token {len(request.tokens) - request.prompt_length + 1} of the output"
