"""Where a replica's model lives: loads it, sizes its cache, runs its steps. One process; a process per rank would stand behind the same
calls."""

from __future__ import annotations

import time

from workers.engine.cache_plan import plan_cache, settle_prefix_caching
from workers.engine.config import EngineConfig
from workers.engine.model_runner import LaunchedStep, ModelRunner
from workers.engine.parallel import Parallel
from workers.engine.rank import Rank
from workers.engine.step import StepPlan, StepResult


class Executor:
    """Loads `config.model` and allocates its cache; then runs steps in order.

    `config` afterwards is the resolved configuration with `max_model_len` settled, and prefix caching off where the model rules it out.
    Raises ModelLoadError where the model cannot be loaded or a setting does not suit it.
    """

    def __init__(self, config: EngineConfig) -> None:
        started = time.monotonic()
        config = config.resolve()
        self._rank = Rank(config)
        self.model_config, self.dtype = self._rank.model_config, self._rank.dtype
        config, self.num_blocks = plan_cache(config, self.model_config, self.dtype, self._rank.load(Parallel()))
        self.weights_seconds = time.monotonic() - started
        self.config = settle_prefix_caching(config, self.model_config)
        self._rank.allocate(self.config, self.num_blocks)

    @property
    def runner(self) -> ModelRunner:
        return self._rank.runner

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.model_config.eos_token_ids

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Raises StepOutOfMemory, after which the cache holds what it held before and the step may be launched again, in other parts."""
        return self._rank.launch(plan)

    def retire(self, launched: LaunchedStep) -> StepResult:
        return self._rank.retire(launched)
