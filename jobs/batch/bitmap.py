"""A set of line numbers with one bit for each, in the order in which Redis counts the bits of a
string.
"""


class Bitmap:
    """Grows as lines are added; bit 7 of the first byte is line 0."""

    def __init__(self, bits: bytes = b"") -> None:
        self.bits = bytearray(bits)

    def add(self, line: int) -> None:
        """Add a line."""
        byte = line >> 3
        if byte >= len(self.bits):
            self.bits.extend(bytes(byte + 1 - len(self.bits)))
        self.bits[byte] |= 0x80 >> (line & 7)

    def discard(self, line: int) -> None:
        """Take a line out, if it is there."""
        if line in self:
            self.bits[line >> 3] ^= 0x80 >> (line & 7)

    def count(self) -> int:
        """Return how many lines there are."""
        return int.from_bytes(self.bits).bit_count()

    def __contains__(self, line: int) -> bool:
        return line >> 3 < len(self.bits) and bool(self.bits[line >> 3] & 0x80 >> (line & 7))
