"""The list of faults: small edits of the product that the suite has to find."""

import tomllib
from pathlib import Path

import msgspec

LIST = Path(__file__).with_name("faults.toml")


class Fault(msgspec.Struct, frozen=True):
    """`old` occurs once in `file` and is replaced by `new`; one of `tests` has to fail then."""

    file: str
    kind: str
    old: str
    new: str
    tests: list[str]

    def applied(self, text: str) -> str:
        """Return the file's text with the fault in it.

        Raises ValueError unless `old` occurs once.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


def read_faults() -> list[Fault]:
    """Read the list."""
    return msgspec.convert(tomllib.loads(LIST.read_text())["fault"], list[Fault])
