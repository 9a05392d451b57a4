"""Define how model families mark their reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The reasoning marks of one model family."""

    name: str
    begin: str
    end: str  # a grammar for the answer begins after it
    also_end: tuple[str, ...] = ()  # other ends of the reasoning, part of the answer
    assumed: bool = False  # whether an answer without the first tag begins with reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that must reach the parser even if they are special tokens."""
        return (self.begin, self.end, *self.also_end)

    def in_reasoning(self, prompt: str) -> bool | None:
        """Return whether the answer to a rendered prompt begins inside reasoning (True), after it
        (False), or the prompt does not determine it (None).

        Templates open reasoning with the first tag, and rule it out with an empty pair of tags.
        """
        tail = prompt.rstrip()
        if tail.endswith(self.begin):
            return True
        return False if tail.endswith(self.end) else None

    def in_continued(self, answer: str) -> bool | None:
        """Return the same for a continued answer, given its beginning in the prompt."""
        begin, end = answer.rfind(self.begin), answer.rfind(self.end)
        return None if begin == end else begin > end


REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>", assumed=True),
        ReasoningFormat("qwen3", "<think>", "</think>", also_end=("<tool_call>",)),
    )
}
