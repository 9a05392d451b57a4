"""What a row is measured with."""

from dataclasses import dataclass

from benchmarks.gpu.roofline import Card


@dataclass(frozen=True, slots=True)
class Setting:
    """`scratch` is a folder for checkpoints, shared by the rows of a run. `card` is what the row of that name measured, if it did.

    On "cpu" everything is tiny: it shows that the benchmark runs, and its figures compare to nothing.
    """

    device: str  # "cuda" or "cpu"
    scratch: str
    card: Card | None = None

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"


class NeedsCard(Exception):
    """The row can only be measured on a card."""
