"""Describe rotary position embeddings by the settings of a config.json, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary settings: the base, the kind of scaling, and its parameters by their names in
    config.json.
    """

    theta: float
    kind: str
    scaling: Mapping[str, Any]
    max_position_embeddings: int
    rotated_share: float = 1.0  # of a head's numbers; see `rotary_order`

    def rotated(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated, some of them by no angle if the kind is
        "proportional".
        """
        if self.kind == "proportional":
            return head_dim
        return int(head_dim * self.rotated_share)

    @property
    def longest(self) -> int:
        """Return the longest context in tokens that the scaling was made for."""
        factor, positions = self.scaling.get("factor"), self.max_position_embeddings
        if self.kind in ("linear", "dynamic"):
            return int(positions * float(self.scaling["factor"]))
        if self.kind == "yarn" and factor:
            return max(positions, int(int(self.scaling["original_max_position_embeddings"]) * float(factor)))
        return positions

    @property
    def depends_on_length(self) -> bool:
        """Return whether a key's rotation depends on the length of its request's prompt, besides
        the position.
        """
        return self.kind in ("dynamic", "longrope")

    @property
    def unscaled_length(self) -> int:
        """Return the tokens up to which a length-dependent kind rotates by position alone."""
        return (
            int(self.scaling["original_max_position_embeddings"])
            if self.kind == "longrope"
            else self.max_position_embeddings
        )
