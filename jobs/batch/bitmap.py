"""A set of line numbers as a bitmap, in the bit order of Redis strings."""


class Bitmap:
    """A bitmap that grows with added lines; bit 7 of the first byte is line 0."""

    def __init__(self, bits: bytes = b"") -> None:
        self.bits = bytearray(bits)

    def add(self, line: int) -> None:
        """Add a line."""
        byte = line >> 3
        if byte >= len(self.bits):
            self.bits.extend(bytes(byte + 1 - len(self.bits)))
        self.bits[byte] |= 0x80 >> (line & 7)

    def discard(self, line: int) -> None:
        """Remove a line, if it is in the set."""
        if line in self:
            self.bits[line >> 3] ^= 0x80 >> (line & 7)

    def count(self) -> int:
        """Return the number of lines."""
        return int.from_bytes(self.bits).bit_count()

    def __contains__(self, line: int) -> bool:
        return line >> 3 < len(self.bits) and bool(self.bits[line >> 3] & 0x80 >> (line & 7))
