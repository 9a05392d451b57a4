"""The states of a batch, and what follows from each."""

from typing import Literal, NamedTuple

State = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
EndState = Literal["completed", "expired", "cancelled"]
JobName = Literal["validate", "advance", "finalize"]


class StateRule(NamedTuple):
    """What may happen to a batch in a state."""

    job: JobName | None = None  # moves it on
    final: bool = False  # of an ended batch little is kept: its lines and results leave Redis
    cancellable: bool = False
    may_expire: bool = False  # when its completion window ends
    kept_in_sight: bool = False  # clients see no earlier state, though a rebuilt batch runs through them again


STATES: dict[State, StateRule] = {
    "validating": StateRule("validate", cancellable=True, may_expire=True, kept_in_sight=True),
    "in_progress": StateRule("advance", cancellable=True, may_expire=True, kept_in_sight=True),
    "finalizing": StateRule("finalize", cancellable=True, kept_in_sight=True),
    "cancelling": StateRule("finalize"),
    "completed": StateRule(final=True),
    "failed": StateRule(final=True),
    "expired": StateRule(final=True),
    "cancelled": StateRule(final=True),
}
"""In the order in which a batch goes through them, and in which clients see them."""

END_STATES: frozenset[str] = frozenset(state for state, rule in STATES.items() if rule.final)
CANCELLABLE: tuple[State, ...] = tuple(state for state, rule in STATES.items() if rule.cancellable)
MAY_EXPIRE: tuple[State, ...] = tuple(state for state, rule in STATES.items() if rule.may_expire)
KEPT_IN_SIGHT: tuple[State, ...] = tuple(state for state, rule in STATES.items() if rule.kept_in_sight)
JOBS: dict[str, JobName] = {state: rule.job for state, rule in STATES.items() if rule.job is not None}
