"""Untrusted text, made safe for a terminal."""


def plain(text: str) -> str:
    """Return the text with each unprintable character replaced by U+FFFD.

    Unprintable are, for example, line breaks, escape characters and direction marks.
    """
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
