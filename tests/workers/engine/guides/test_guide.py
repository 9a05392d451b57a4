"""The state of one output: its reasoning, its grammar, its end."""

import pytest

from tests.workers.engine.guides.texts import END, TOKENS, choice, regex, token
from tests.workers.engine.models.tiny_models import VOCAB
from workers.engine.guides.guide import Guide, is_void
from workers.engine.guides.guide_threads import GuideThreads
from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.core import OutputGuide

VOCABULARY = Vocabulary(TOKENS, VOCAB)


def guide(grammar: str, reasoning_end: str = "", budget: int = -1) -> Guide:
    spec = OutputGuide(grammar, reasoning_end, bool(reasoning_end), budget)
    return Guide(spec, VOCABULARY, VOCABULARY.compile(grammar) if grammar else None, (END,))


def advance(one: Guide, *texts: str) -> list[str]:
    return [one.advance(token(text)) for text in texts]


def test_a_marker_may_come_in_parts_and_go_on_with_the_answer() -> None:
    for texts in (["</think>"], ["</", "think", ">"], ["<", "</", "t", "h", "i", "n", "k", ">"], ["</", "think", ">{"]):
        one = guide(regex("[{]?x[0-9]"), "</think>")
        assert not any(advance(one, "x", *texts[:-1]))
        assert not one.in_grammar
        assert not any(advance(one, texts[-1]))
        assert one.in_grammar
        assert not any(advance(one, "x", "1"))
        assert one.complete


def test_white_space_behind_the_marker_is_not_the_grammars() -> None:
    one = guide(choice("red"), "k")
    assert advance(one, "think") == [""]
    spaced = guide(choice("{a"), "ink")
    assert not any(advance(spaced, "think", "{", "a"))
    assert spaced.complete
    assert "cannot be followed" in guide(choice("red"), ">").advance(token(">{"))


def test_a_text_that_only_looks_like_the_marker_ends_nothing() -> None:
    one = guide(choice("red"), "</think>")
    assert not any(advance(one, "<", "/", "think", "</", "think", "</", "</"))
    assert not one.in_grammar
    assert not any(advance(one, "think", ">"))
    assert one.in_grammar


@pytest.mark.parametrize("budget", [0, 3])
def test_after_the_budget_only_the_marker_may_come(budget: int) -> None:
    one = guide(choice("red"), "</end>", budget)
    for _ in range(budget):
        assert one.forced_token() is None
        assert one.advance(token("a")) == ""
    forced = []
    while (following := one.forced_token()) is not None:
        forced.append(following)
        assert one.advance(following) == ""
    assert [TOKENS[number] for number in forced] == [b"</", b"e", b"n", b"d", b">"]
    assert one.in_grammar
    other = guide("", "</end>", 0)
    assert "the reasoning cannot be ended" in other.advance(token("a"))


def test_a_guide_knows_when_it_has_nothing_more_to_say() -> None:
    free = guide("", "</think>", 5)
    assert not free.finished
    assert advance(free, "</think>") == [""]
    assert free.finished
    assert not guide(choice("a")).finished
    void = OutputGuide(), OutputGuide("", "</think>", True), OutputGuide("", "</think>", False, 3)
    assert all(map(is_void, void))
    assert not is_void(OutputGuide("", "</think>", True, 3))
    assert not is_void(OutputGuide(choice("a")))


def test_the_end_of_the_text_completes_no_grammar() -> None:
    one = guide(choice("a", "ab"))
    assert not any(advance(one, "a"))
    assert one.advance(END) == ""
    assert not one.complete
    assert "cannot be followed" in guide(choice("ab")).advance(END)


def test_a_mask_that_fails_fails_the_guide() -> None:
    """In place of an error the library would allow the end of the text, as if the answer were
    whole.
    """
    without = Vocabulary([b"a", b"b"], VOCAB)
    stuck = Guide(OutputGuide(choice("ax")), without, without.compile(choice("ax")), (1,))
    assert stuck.advance(0) == ""
    stuck.prepare()
    made, late = GuideThreads(1).masks([(3, stuck)])
    assert made.rows.tolist() == [3]
    assert not made.masks.any()
    assert not late
    assert stuck.mask_error.startswith("the output's grammar cannot be followed: ")
    assert "\n" not in stuck.mask_error


def allowed(one: Guide) -> set[bytes]:
    one.prepare()
    assert one.mask is not None
    bits = one.mask.view("uint32")
    return {TOKENS[number] for number in range(len(TOKENS)) if bits[number // 32] >> number % 32 & 1}


def undecided(grammar: str, budget: int = -1) -> Guide:
    spec = OutputGuide(grammar, "</think>", True, budget, "<think>")
    return Guide(spec, VOCABULARY, VOCABULARY.compile(grammar) if grammar else None, (END,))


def test_where_reasoning_may_begin_the_first_token_decides() -> None:
    answered, reasoned = undecided(choice("red")), undecided(choice("red"))
    assert allowed(answered) == {b"r", b"re", b"red", b"<"}
    assert not any(advance(answered, "re"))
    assert allowed(answered) == {b"d"}
    assert not any(advance(answered, "d"))
    assert answered.complete
    assert not any(advance(reasoned, "<"))
    assert allowed(reasoned) == {b"t", b"think"}
    assert not any(advance(reasoned, "think", ">", "blue", "</think>"))
    assert allowed(reasoned) == {b"r", b"re", b"red"}
    assert not any(advance(reasoned, "red"))
    assert reasoned.complete


def test_a_grammar_may_begin_like_the_reasoning() -> None:
    grammar = choice("<tab>", "<think>!")
    answered, reasoned = undecided(grammar), undecided(grammar)
    assert not any(advance(answered, "<", "t"))
    assert allowed(answered) == {b"a", b"ab", b"h"}
    assert not any(advance(answered, "ab", ">"))
    assert answered.complete
    assert not any(advance(reasoned, "<", "think", ">", "x", "</think>"))
    assert allowed(reasoned) == {b"<"}


def test_a_budget_counts_only_what_began_as_reasoning() -> None:
    answered, reasoned = undecided("", 1), undecided("", 1)
    assert not answered.finished
    assert not any(advance(answered, "a"))
    assert answered.finished
    assert not any(advance(reasoned, "<", "think", ">", "x"))
    assert reasoned.forced_token() == token("</think>")
