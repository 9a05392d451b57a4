"""Load a replica's model, size its KV cache and run its steps.

The model is in this process alone, or in several ranks, of which this process is the first.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

from workers.engine.attention.context import Interruption
from workers.engine.checkpoint.model_digest import digest_of
from workers.engine.device.device import take_devices
from workers.engine.device.memory import available_memory
from workers.engine.device.model_runner import LaunchedStep, ModelRunner
from workers.engine.device.pooling_runner import PoolingRunner
from workers.engine.device.rank import Rank, open_shard
from workers.engine.device.ranks import OnDeath, Ranks, end_likewise
from workers.engine.device.resolve import resolve
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.step import MakeMasks, StepPlan, StepResult
from workers.engine.native.cache_memory import CacheMemory

logger = logging.getLogger(__name__)


class Executor:
    """Locks its devices, loads `config.model` and allocates the KV cache; then runs steps in order.

    Afterwards `config` is resolved: `max_model_len` fits the cache, and prefix caching is off if
    the model rules it out. Raises ModelLoadError if the model cannot be loaded or a setting does
    not suit it.
    """

    def __init__(self, config: EngineConfig, on_rank_death: OnDeath = end_likewise) -> None:
        """Load the model.

        `on_rank_death` is called in another thread when another rank has ended; it must end this
        process.
        """
        devices, self._gpus = take_devices(config)
        with ExitStack() as undo:
            undo.callback(self._gpus.release)
            # Before ranks start, since this refuses a model that cannot be sharded.
            checkpoint = open_shard(config)
            resolved = resolve(config, devices[0], checkpoint.config)
            if len(devices) > 1:
                logger.info("%d ranks share the model, on %s", len(devices), ", ".join(dict.fromkeys(devices)))
            self._ranks = Ranks(devices[1:], self._gpus.fds[1:], on_rank_death)
            undo.callback(self._ranks.close)
            self._rank = Rank(resolved, checkpoint)
            with self._ranks.heard_first():
                self.config, self.num_pages = self._rank.settle(self._ranks.join(resolved, self._rank.device))
            self._undo = undo.pop_all()
        self.model_config, self.dtype = self._rank.model_config, self._rank.dtype
        self.weights_seconds = self._rank.weights_seconds
        self.cache_groups = self._rank.runner.cache_groups
        self.model_digest = digest_of(checkpoint.folder, checkpoint.dummy)
        self.cache_memory = self._cache_memory()

    @property
    def runner(self) -> ModelRunner | PoolingRunner:
        return self._rank.runner

    @property
    def interruption(self) -> Interruption | None:
        """Return the object that abandons a step; None on a GPU, and with several ranks."""
        return self.runner.interruption if self.config.tensor_parallel_size == 1 else None

    @property
    def gpus(self) -> list[str]:
        """Return the host's names of the replica's GPUs; none on a CPU."""
        return self._gpus.names

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.model_config.eos_token_ids

    def _cache_memory(self) -> CacheMemory | None:
        """Return an object that populates pages ahead of their use, or None.

        It is None in three cases: the cache has its memory from the start; freed pages are reused
        first, as without prefix caching and in windows; there are several ranks.
        """
        lazy = self.runner.layers[0].attention.lazy_cache
        reused = any(not group.rule.keeps_all for group in self.cache_groups.groups)
        if reused or not (lazy and self.config.enable_prefix_caching and self.config.tensor_parallel_size == 1):
            return None
        return CacheMemory(self.runner.pages, available_memory)

    def launch(self, plan: StepPlan, masks: MakeMasks | None = None) -> LaunchedStep:
        """Launch a step; one with guided samples calls `masks` between the model and the draw.

        After StepAbandoned or StepOutOfMemory the cache is unchanged, and the step may be launched
        again, also in parts. After RankError no step can be launched.
        """
        if self.cache_memory is not None:
            self.cache_memory.use(plan)
        with self._ranks.heard_first():
            self._ranks.send(plan)
            return self._rank.launch(plan, self._ranks.shared(masks))

    def retire(self, launched: LaunchedStep) -> StepResult:
        with self._ranks.heard_first():
            return self._rank.retire(launched)

    def close(self) -> None:
        """End the other ranks and release the GPUs."""
        self._undo.close()
