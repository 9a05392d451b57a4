"""Members of bodies that no endpoint's table of parameters has: refused by name, or counted."""

from collections.abc import Iterable

import msgspec

from jobs.protocol import fields
from jobs.protocol.endpoint import BatchEndpoint

MOST_UNKNOWN = 100
"""Names that are counted by themselves; lines with others count under `OTHERS`."""
OTHERS = "…"


class UnknownMember(msgspec.Struct, frozen=True):
    """A name that lines have in their bodies, where it changes nothing."""

    name: str
    lines: int
    nearest: str = ""  # the known name that is most like it, if one is


class UnknownMembers:
    """Counts the unknown members of lines by their names."""

    def __init__(self) -> None:
        self._found: dict[str, UnknownMember] = {}

    def add(self, names: Iterable[str], endpoint: BatchEndpoint) -> None:
        """Count the members of one line's body that its endpoint does not know."""
        unknown = {fields.shown(name) for name in names if name not in endpoint.members}
        new, room = sorted(unknown - self._found.keys()), max(0, MOST_UNKNOWN - len(self._found))
        for name in [*(unknown & self._found.keys()), *new[:room], *([OTHERS] if new[room:] else [])]:
            found = self._found.get(name) or UnknownMember(name, 0, nearest_member(name, endpoint))
            self._found[name] = msgspec.structs.replace(found, lines=found.lines + 1)

    def listed(self) -> list[UnknownMember]:
        """Return them, the most frequent first."""
        return sorted(self._found.values(), key=lambda member: (-member.lines, member.name))


def check_members(names: Iterable[str], endpoint: BatchEndpoint, prefix: str = "") -> None:
    """Raise `ApiError` 400 for a member that the endpoint does not know."""
    unknown = next((name for name in names if name not in endpoint.members), None)
    if unknown is not None:
        name = fields.shown(unknown)
        nearest = nearest_member(name, endpoint)
        hint = f" Did you mean '{prefix}{nearest}'?" if nearest else ""
        fields.fail(f"Unknown parameter: '{prefix}{name}'.{hint}", f"{prefix}{name}", "unknown_parameter")


def nearest_member(name: str, endpoint: BatchEndpoint) -> str:
    """Return the member of the endpoint's bodies that is most like `name`, "" if none is."""
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(endpoint.members), 1)), "")


def described(members: Iterable[UnknownMember]) -> str:
    """Return how often each was found, in one line."""
    return ", ".join(f"{member.name} ({_lines(member)}{_hint(member)})" for member in members)


def _lines(member: UnknownMember) -> str:
    return f"{member.lines} line{'s' if member.lines != 1 else ''}"


def _hint(member: UnknownMember) -> str:
    return f"; did you mean {member.nearest}?" if member.nearest else ""
