"""Limit the time of a step while a live request runs or waits.

Such a step should take no longer than `--live-step-ms`. This is the gap that clients of live
streams see, and the time that a new live request waits for its first step. A step takes longer only
for its decode rows, or for live prompts:

- Prompts of live requests are cut to 1.6 times that, whether or not another live request decodes.
  Cut prompts cost little more, and no live stream has a gap as long as a prompt. The prompt itself
  loses no time, since batch requests give way to it. Live prompts are computed one after another.
- If several live prompts wait and no batch request does, a step may take up to 3 times that, as
  long as its decode rows take more than 8 % of it. All prompts wait for these rows in each step.
- Batch requests have a share of each step, so that endless live requests do not stop them. Beyond
  that share, they fill a step with a live prompt up to half of the time left by the live rows,
  since its first token comes at the step's end.
"""

from collections.abc import Iterable, Iterator

from workers.engine.scheduling.queues import BATCH_SHARE, PriorityClass
from workers.engine.scheduling.request import RequestState
from workers.engine.scheduling.step_builder import StepBuilder
from workers.engine.scheduling.step_cost import StepCost

# Shortest step as a multiple of its decode rows' time, so that prompts always continue
_BEYOND_DECODING = 1.15
# The same as a multiple of an empty step, if no live stream would wait: with smaller chunks, a
# prompt on a device with slow steps would take several times as long
_WITHOUT_STREAMS = 3.0
# Live steps that one step may take for one live prompt
ONE_PROMPT = 1.6
# Further live steps for each further prompt
_FURTHER_PROMPT = 0.2
# Most live steps for any number of prompts
_MOST_PROMPTS = 3.0
# Smallest share of such a longer step for its decode rows
_DECODING_SHARE = 0.08
# Share of the time left by live rows that batch requests fill in a step with a live prompt
_FILLED_BESIDE_PROMPTS = 0.5
# Fewest prompt tokens: a row of one token counts as a decode row, and would not correct a prompt
# cost that is far too high
_LEAST_TOKENS = 4


class LiveStepTime:
    """Track the seconds left in a step.

    Between `keep_for_batch` and `open_to_batch`, live requests get the time outside the batch
    requests' share.
    """

    def __init__(self, cost: StepCost, limit: float, step: StepBuilder, batch: PriorityClass, prompts: int) -> None:
        """Compute the time of a step.

        `step` has the live requests that decode; `prompts` is the number of live requests with a
        prompt to compute.
        """
        self._cost = cost
        has_batch = bool(batch.running or batch.waiting)
        live = cost.empty + cost.decode(len(step.starts), sum(step.starts))
        contexts = [request.computed for request in decoding(batch.running)]
        self._rows, self._rows_seconds = len(contexts), cost.decode(len(contexts), sum(contexts))
        prompt_limit = 0.0 if step.starts else _WITHOUT_STREAMS * cost.empty
        with_prompts = ONE_PROMPT * limit
        if not has_batch:
            with_prompts = max(with_prompts, min(live_steps_for(prompts) * limit, live / _DECODING_SHARE))
        limit = max(limit, prompt_limit, _BEYOND_DECODING * (live + self._rows_seconds))
        self._live_rows, self._left = len(step.starts), limit - live
        self._beyond = max(0.0, with_prompts - limit)  # seconds for live prompts only
        share = BATCH_SHARE if has_batch else 0.0
        self._kept_seconds, self._kept_tokens = share * limit, int(share * step.budget)
        self.seconds = self._left + self._beyond

    def keep_for_batch(self, step: StepBuilder) -> None:
        """Take the share of the batch requests from the step's seconds and tokens."""
        self.seconds -= self._kept_seconds
        step.budget -= self._kept_tokens

    def open_to_batch(self, step: StepBuilder) -> None:
        """Give batch requests their share and the time left, or half of the time left if the step
        has a live prompt.
        """
        has_prompt = len(step.starts) > self._live_rows
        unfilled = (1 - _FILLED_BESIDE_PROMPTS) * self._left if has_prompt else 0.0
        self.seconds = max(0.0, self.seconds - self._beyond - unfilled) + self._kept_seconds
        step.budget += self._kept_tokens

    def rows(self) -> int:
        """Return how many batch requests have time to decode, at least one."""
        if self._rows_seconds <= self.seconds:
            return self._rows
        return max(1, int(self._rows * self.seconds / self._rows_seconds))

    def spend_rows(self, rows: int) -> None:
        self.seconds -= self._rows_seconds * rows / max(1, self._rows)

    def tokens(self, start: int) -> int:
        """Return how many prompt tokens from position `start` on fit into the time left.

        It is at least `_LEAST_TOKENS` while any time is left.
        """
        return max(_LEAST_TOKENS, self._cost.tokens_within(self.seconds, start)) if self.seconds > 0 else 0

    def spend_tokens(self, start: int, count: int) -> None:
        """Subtract the time of prompt tokens; if they fill the time left, nothing remains."""
        left = max(0.0, self.seconds - self._cost.prompt(start, count))
        self.seconds = 0.0 if count >= self.tokens(start) else left


def live_steps_for(prompts: int) -> float:
    """Return how many live steps a step may take at most for so many live prompts."""
    return min(_MOST_PROMPTS, ONE_PROMPT + _FURTHER_PROMPT * (prompts - 1))


def decoding(requests: Iterable[RequestState]) -> Iterator[RequestState]:
    """Yield the requests with one token to compute; their list may become shorter meanwhile."""
    return (request for request in requests if request.known - request.computed == 1)


def in_prompt(requests: Iterable[RequestState]) -> Iterator[RequestState]:
    """Yield the requests with more to compute; their list may become shorter meanwhile."""
    return (request for request in requests if request.known - request.computed > 1)
