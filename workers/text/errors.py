"""The two things that can go wrong with text: what the operator gave, and what a request asks for."""

from __future__ import annotations


class TokenizerError(Exception):
    """The tokenizer or the chat template cannot be used; one sentence that says why and what to do."""


class TemplateError(Exception):
    """These messages cannot be rendered with the model's chat template; one sentence for the caller."""
