"""Run the steps of a model that pools: each request yields numbers instead of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.backends.base import Backend
from workers.engine.cuda.staging import to_device
from workers.engine.device.model_runner import LaunchedStep, ModelRunner, PooledRows
from workers.engine.device.step_runner import StepRunner
from workers.engine.messages.core import PoolingParams
from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.messages.step import MakeMasks, StepPlan, StepResult
from workers.engine.models.base import DecoderModel
from workers.engine.models.pooling import PoolingModel
from workers.engine.profiling import span


@dataclass(slots=True)
class _EndedRows:
    """The R of N rows that end in a step."""

    rows: NDArray[np.int64]  # [R]
    params: list[PoolingParams]
    counts: Tensor  # int64 [R], tokens of the rows in this step
    last: Tensor  # int64 [R], last token of each row


class PoolingRunner(StepRunner):
    """Launches and retires steps like `ModelRunner`; stores the parameters of requests by slot."""

    graphs = None

    def __init__(self, config: ResolvedConfig, backend: Backend, model: PoolingModel, num_pages: int) -> None:
        super().__init__(config, backend, model, num_pages)
        self.model = model
        task = "classify" if "classify" in model.config.tasks else "embed"
        self._params = [PoolingParams(task)] * config.max_num_seqs
        self._second_text = np.zeros(config.max_num_seqs, np.int64)

    def prepare(self) -> None:
        """Do nothing: steps are not recorded."""

    @torch.inference_mode()
    def launch(self, plan: StepPlan, masks: MakeMasks | None = None) -> LaunchedStep:
        """Compute a step and pool the requests that end in it.

        Raises StepAbandoned if `interruption` is set before the last layer begins.
        """
        self._copies.make_room()
        for request in plan.added:
            self._second_text[request.slot] = request.second_text
            if request.pooling is not None:
                self._params[request.slot] = request.pooling
        with span("inputs"):
            inputs = self.inputs.take(plan)
            types = self._token_types(plan)
            ended = self._ended(plan, inputs.last)
        attend = self._attend(inputs, self.model.position_bias, self._needed(ended))
        with span("forward"):
            hidden = self.model.forward(inputs.input_ids, inputs.positions, inputs.lengths, types, attend)
        with span("pool"):
            parts = self._pool(plan, hidden, ended) if len(ended.rows) else []
        copies, done = self._copies.start([part.values for part in parts])
        for part, copy in zip(parts, copies, strict=True):
            part.values = copy
        nothing = torch.empty(0, dtype=torch.int32)
        return LaunchedStep(nothing, np.empty(0, np.int64), None, [], pooled=parts, done=done)

    def retire(self, launched: LaunchedStep) -> StepResult:
        """Wait for the device and return the result of a step."""
        if launched.done is not None:
            launched.done.synchronize()
        pooled = [b""] * sum(len(part.places) for part in launched.pooled)
        for part in launched.pooled:
            rows = np.split(part.values.numpy(), np.cumsum(part.counts)[:-1])
            for place, row in zip(part.places, rows, strict=True):
                pooled[place] = row.astype("<f4", copy=False).tobytes() if np.isfinite(row).all() else b""
        return StepResult(launched.tokens.numpy(), pooled=pooled)

    def _token_types(self, plan: StepPlan) -> Tensor | None:
        """Return each token's type, 1 from the second text of a pair on; None if all are 0."""
        begins = self._second_text[plan.slots]
        if not begins.any():
            return None
        rows, positions = _positions(plan)
        types = (begins[rows] > 0) & (positions >= begins[rows])
        return to_device(types.astype(np.int64), self.device)

    def _ended(self, plan: StepPlan, last: Tensor) -> _EndedRows:
        rows = np.flatnonzero(plan.samples)
        counts = to_device(plan.counts[rows].astype(np.int64), self.device)
        return _EndedRows(rows, [self._params[slot] for slot in plan.slots[rows].tolist()], counts, last)

    def _needed(self, ended: _EndedRows) -> Tensor | None:
        """Return the tokens whose hidden states are read; None for all."""
        if any(params.task == "token_embed" for params in ended.params):
            return None
        return self.model.pooler.needed(ended.counts, ended.last)

    def _pool(self, plan: StepPlan, hidden: Tensor, ended: _EndedRows) -> list[PooledRows]:
        """Pool the rows that end, rows with equal parameters together."""
        skipped = np.array([params.unpooled for params in ended.params], np.int64)
        pooled = self.model.pooler.pool(
            hidden, ended.counts, ended.last, to_device(skipped, self.device) if skipped.any() else None
        )
        groups: dict[PoolingParams, list[int]] = {}
        for place, params in enumerate(ended.params):
            groups.setdefault(params, []).append(place)
        parts = []
        for params, places in groups.items():
            if params.task == "token_embed":
                parts.append(self._each_token(plan, hidden, params, ended.rows[places], places))
            else:
                rows = pooled if len(groups) == 1 else pooled[to_device(np.array(places), self.device)]
                parts.append(PooledRows(places, [1] * len(places), self.model.pooler.finish(rows, params)))
        return parts

    def _each_token(
        self, plan: StepPlan, hidden: Tensor, params: PoolingParams, rows: NDArray[np.int64], places: list[int]
    ) -> PooledRows:
        of_rows = np.flatnonzero(np.isin(_positions(plan)[0], rows))
        tokens = hidden[to_device(of_rows, self.device)]
        return PooledRows(places, plan.counts[rows].tolist(), self.model.pooler.embedding(tokens, params))


def make_runner(
    config: ResolvedConfig, backend: Backend, model: DecoderModel | PoolingModel, num_pages: int
) -> ModelRunner | PoolingRunner:
    """Return the runner of a model's steps."""
    runner = PoolingRunner if isinstance(model, PoolingModel) else ModelRunner
    return runner(config, backend, model, num_pages)  # type: ignore[arg-type]


def _positions(plan: StepPlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each token's row, and its position in the text."""
    rows = np.repeat(np.arange(len(plan.counts)), plan.counts)
    before = np.cumsum(plan.counts) - plan.counts
    return rows, np.arange(len(rows)) + (plan.starts - before)[rows]
