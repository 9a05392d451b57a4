"""How long a core that has requests may say nothing before it counts as hung."""

LONGEST_PATIENCE = 300.0
SHORTEST_PATIENCE = 20.0
STEPS = 10
"""A core may be silent for as long as so many full steps take."""


class Patience:
    """Seconds of silence that are waited: those that were asked for, else what the steps so far
    teach, within the two bounds above.

    One for all the cores that a worker starts, since the next one runs the same model on the same
    device: what the last one taught holds until it has steps of its own to judge by.
    """

    def __init__(self, asked: float | None = None) -> None:
        self._asked = asked
        self._full_step = 0.0

    @property
    def seconds(self) -> float:
        if self._asked is not None:
            return self._asked
        if not self._full_step:
            return LONGEST_PATIENCE
        return min(LONGEST_PATIENCE, max(SHORTEST_PATIENCE, STEPS * self._full_step))

    def learn(self, full_step: float) -> None:
        """`full_step`: how many seconds a step of the largest size takes at most, as far as the
        core knows now; 0 if it does not.
        """
        self._full_step = full_step or self._full_step
