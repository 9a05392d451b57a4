"""Shares of what an API process has little of, so that no client takes all of it."""

from collections import Counter


class ClientShares:
    """Amounts that are held by owners: at most `most` together, and `most_of_one` by each.

    For the event loop alone.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self.held: Counter[str] = Counter()
        self._most = most
        self._most_of_one = most_of_one
        self._all = 0

    def exceeds_own(self, owner: str, amount: int) -> bool:
        """Return whether so much more is above the owner's share."""
        return self.held[owner] + amount > self._most_of_one

    def take(self, owner: str, amount: int = 1) -> bool:
        """Hold an amount more, and return True, unless it is too much."""
        if self.exceeds_own(owner, amount) or self._all + amount > self._most:
            return False
        self.held[owner] += amount
        self._all += amount
        return True

    def give_back(self, owner: str, amount: int = 1) -> None:
        """Hold an amount less."""
        self._all -= amount
        self.held[owner] -= amount
        if not self.held[owner]:
            del self.held[owner]
