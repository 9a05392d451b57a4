"""How families of models mark their reasoning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How the models of one family mark their reasoning."""

    name: str
    begin: str
    end: str  # a grammar for the answer begins behind it
    also_end: tuple[str, ...] = ()  # these end it too, and belong to the answer
    assumed: bool = False  # whether an answer without the first tag begins with reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must reach the parser although they may be special tokens."""
        return (self.begin, self.end, *self.also_end)

    def in_reasoning(self, prompt: str) -> bool | None:
        """Return whether the answer to a rendered prompt begins inside reasoning (True), behind it
        (False), or the prompt does not say (None).

        Templates open it with the first tag, and rule it out with an empty pair of tags.
        """
        tail = prompt.rstrip()
        if tail.endswith(self.begin):
            return True
        return False if tail.endswith(self.end) else None

    def in_continued(self, answer: str) -> bool | None:
        """Return the same for an answer that goes on, given what there is of it in the prompt."""
        begin, end = answer.rfind(self.begin), answer.rfind(self.end)
        return None if begin == end else begin > end


REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>", assumed=True),
        ReasoningFormat("qwen3", "<think>", "</think>", also_end=("<tool_call>",)),
    )
}
