"""The states of a batch."""

from typing import Literal

State = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
EndState = Literal["completed", "expired", "cancelled"]
END_STATES = frozenset({"failed", "completed", "expired", "cancelled"})
CANCELLABLE: tuple[State, ...] = ("validating", "in_progress", "finalizing")
