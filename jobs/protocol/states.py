"""The states of a batch, and the rules of each."""

from typing import Literal, NamedTuple

State = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
EndState = Literal["completed", "expired", "cancelled"]
JobName = Literal["validate", "advance", "finalize"]


class StateRule(NamedTuple):
    """The rules of a state."""

    job: JobName | None = None  # the job that advances the batch
    final: bool = False  # the batch ended: its lines and results leave Redis
    cancellable: bool = False
    may_expire: bool = False  # at the end of its completion window
    kept_in_sight: bool = False  # clients see no earlier state, though a rebuilt batch repeats them


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
"""The order in which a batch passes through the states, and in which clients see them."""

END_STATES: frozenset[str] = frozenset(state for state, rule in STATES.items() if rule.final)
CANCELLABLE: tuple[State, ...] = tuple(state for state, rule in STATES.items() if rule.cancellable)
MAY_EXPIRE: tuple[State, ...] = tuple(state for state, rule in STATES.items() if rule.may_expire)
KEPT_IN_SIGHT: tuple[State, ...] = tuple(state for state, rule in STATES.items() if rule.kept_in_sight)
JOBS: dict[str, JobName] = {state: rule.job for state, rule in STATES.items() if rule.job is not None}
