"""What can go wrong with text: what the operator gave, or what a request asks for.

TextError
  TokenizerError        the tokenizer or the template cannot be used
  TemplateError         these messages cannot be rendered
    TemplateTimeoutError  it takes too long
  EncodingError         the tokenizer fails on this text
  FormatError           an answer cannot have the form that is asked for
  GrammarCompilerError  the process that compiles grammars cannot be started
    CompilerEndedError  it ended while it compiled
  TimeLimitError        it took too long
  ParserError           there is no such parser of answers, or it cannot be loaded
"""

from __future__ import annotations


class TextError(Exception):
    """Base of the errors of text; the message is one sentence."""

    exit_code = 2
    retry = False


class TokenizerError(TextError):
    """The tokenizer or the chat template cannot be used; one sentence that says why and what to
    do.
    """


class ParserError(TextError):
    """There is no such parser of answers, or it cannot be loaded; one sentence that says why."""


class TemplateError(TextError):
    """These messages cannot be rendered with the model's chat template; one sentence for the
    caller.
    """


class TemplateTimeoutError(TemplateError):
    """Rendering these messages takes too long."""


class EncodingError(TextError):
    """The tokenizer fails on this text; one sentence for the caller."""


class FormatError(TextError):
    """An answer cannot have the form that is asked for; one sentence for the caller."""


class GrammarCompilerError(TextError):
    """The process that compiles grammars cannot be started; one sentence that says why."""


class CompilerEndedError(GrammarCompilerError):
    """The process that compiles grammars ended while it compiled; one sentence that says how."""


def is_panic(error: BaseException) -> bool:
    """Return whether the tokenizers library gave up in its Rust code, such as on a text that its
    regular expression cannot cope with.

    That is no `Exception`, so that it would end the process.
    """
    return type(error).__name__ == "PanicException"
