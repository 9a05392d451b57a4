"""The check whether a model fits on this machine beside the loaded ones."""

from collections.abc import Iterable

from pipeline.hosting.needs import Needs, count_gpus
from workers.engine.device.memory import available_memory, gib


class Room:
    """The machine's memory, or the part of it that models may take, and its GPUs."""

    def __init__(self, max_memory: int | None) -> None:
        self._max_memory = max_memory
        self._gpus = count_gpus()

    @property
    def memory(self) -> int | None:
        """Bytes that models may take; None if neither a flag nor the machine sets them."""
        known = [size for size in (self._max_memory, available_memory()) if size is not None]
        return min(known, default=None)

    def shortage(
        self, needs: Needs, loaded: Iterable[Needs], starting: Iterable[Needs], leaving: Iterable[Needs]
    ) -> str:
        """Return the reason why a model does not fit, as the end of "The model ...", or "".

        `loaded` models have allocated their memory. `starting` models may still allocate all they
        need. `leaving` models are loaded, and will free their memory.
        """
        loaded, starting, leaving = list(loaded), list(starting), list(leaving)
        others = [*loaded, *starting]
        gpus = self._gpus - sum(one.gpus for one in others) + sum(one.gpus for one in leaving)
        if needs.gpus > gpus and needs.gpus:
            return f"needs {needs.gpus} GPU{'s' * (needs.gpus > 1)}, and {max(0, gpus)} of {self._gpus} are free"
        reserved = sum(one.most for one in others) - sum(one.most for one in leaving)
        wanted = f"needs about {gib(needs.memory)} of memory"
        if self._max_memory is not None:
            left = self._max_memory - reserved
            if needs.memory > left:
                return f"{wanted}, and of the {gib(self._max_memory)} of --max-memory {gib(max(0, left))} are left"
        available = available_memory()
        if available is None:
            return ""
        left = available + sum(one.taken for one in loaded) - reserved
        return f"{wanted}, and {gib(max(0, left))} are available" if needs.memory > left else ""
