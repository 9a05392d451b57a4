"""The pages of a KV cache whose layers form several groups."""

NULL_PAGE = 0


class PagePool:
    """Hold the unused pages, and count those that requests use.

    The other pages have cached content that no request uses: they are free, but not unused.
    """

    def __init__(self, num_pages: int) -> None:
        """Take `num_pages` pages, the null page included."""
        self.num_pages = num_pages
        self.in_use = 0
        self.unused = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def num_free(self) -> int:
        return self.num_pages - 1 - self.in_use

    def take(self, count: int) -> list[int]:
        """Return `count` unused pages, which are then in use."""
        first = len(self.unused) - count
        pages = self.unused[first:]
        del self.unused[first:]
        self.in_use += count
        return pages
