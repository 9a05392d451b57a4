"""Define the errors of text processing, caused by the operator's files or by requests.

TextError
  TokenizerError        the tokenizer or the template cannot be used
  TemplateError         these messages cannot be rendered
    TemplateTimeoutError  it takes too long
  EncodingError         the tokenizer fails on this text
  FormatError           an answer cannot have the requested form
  GrammarCompilerError  the process that compiles grammars cannot be started
    CompilerEndedError  it ended while it compiled
  TimeLimitError        it took too long
  ParserError           the parser does not exist or cannot be loaded
"""

from __future__ import annotations


class TextError(Exception):
    """Base of the errors of text; the message is one sentence."""

    exit_code = 2
    retry = False


class TokenizerError(TextError):
    """The tokenizer or the chat template cannot be used; one sentence with cause and remedy."""


class ParserError(TextError):
    """The parser does not exist or cannot be loaded; the message is one sentence."""


class TemplateError(TextError):
    """These messages cannot be rendered with the model's chat template; one sentence for the
    caller.
    """


class TemplateTimeoutError(TemplateError):
    """Rendering these messages takes too long."""


class EncodingError(TextError):
    """The tokenizer fails on this text; one sentence for the caller."""


class FormatError(TextError):
    """An answer cannot have the requested form; one sentence for the caller."""


class GrammarCompilerError(TextError):
    """The process that compiles grammars cannot be started; one sentence with the cause."""


class CompilerEndedError(GrammarCompilerError):
    """The process that compiles grammars ended while it compiled; one sentence with its status."""


def is_panic(error: BaseException) -> bool:
    """Return whether the error is a panic of the tokenizers library's Rust code.

    Its regular expression panics on some texts. A panic is not an `Exception`, so unhandled it
    would end the process.
    """
    return type(error).__name__ == "PanicException"
