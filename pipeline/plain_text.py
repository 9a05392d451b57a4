"""Text of others, as a terminal may show it."""


def plain(text: str) -> str:
    """Return the text with each character that is not printable, such as those that begin control
    sequences, breaks of lines and marks of writing direction, replaced by U+FFFD.
    """
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
