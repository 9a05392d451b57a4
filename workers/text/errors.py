"""What can go wrong with text: what the operator gave, or what a request asks for."""

from __future__ import annotations


class TokenizerError(Exception):
    """The tokenizer or the chat template cannot be used; one sentence that says why and what to
    do.
    """


class TemplateError(Exception):
    """These messages cannot be rendered with the model's chat template; one sentence for the
    caller.
    """


class EncodingError(Exception):
    """The tokenizer fails on this text; one sentence for the caller."""


def is_panic(error: BaseException) -> bool:
    """Return whether the tokenizers library gave up in its Rust code, such as on a text that its
    regular expression cannot cope with.

    That is no `Exception`, so that it would end the process.
    """
    return type(error).__name__ == "PanicException"
