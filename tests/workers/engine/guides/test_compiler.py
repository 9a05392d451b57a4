"""Requests that wait for their guides, and the core's loop meanwhile."""

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from llguidance import LLMatcher, LLParserLimits

from tests.support.waiting import wait_until
from tests.workers.engine.guides.texts import TOKENS, choice, regex, schema
from tests.workers.engine.test_guided import GREEDY, answer, guided_core, plain, request, written
from workers.engine.core import EngineCore
from workers.engine.guides.compiler import _NOT_COMPILED
from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.core import AbortRequests, AddRequests, Finish, SetVocabulary, Shutdown, StepOutput, ToCore

SECONDS = 20


class Gate:
    """Keeps back the compiling of grammars that begin with `held`, until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: str) -> None:
        self.open = threading.Event()
        self.compiled: list[str] = []
        compiles = Vocabulary.compile

        def compile_later(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
            if held in grammar:
                assert self.open.wait(SECONDS)
            self.compiled.append(grammar)
            return compiles(vocabulary, grammar)

        monkeypatch.setattr(Vocabulary, "compile", compile_later)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    held = Gate(monkeypatch, "later")
    yield held
    held.open.set()


def finished(output: StepOutput | None) -> dict[int, Finish]:
    if output is None:
        return {}
    return {number: Finish(how) for number, how in zip(output.request_ids, output.finish, strict=True) if how}


def drive(core: EngineCore, until: set[int]) -> dict[int, Finish]:
    """Step until these have ended; how."""
    ends: dict[int, Finish] = {}
    while not until <= set(ends):
        ends |= finished(core.step())
    return ends


@pytest.mark.parametrize("depth", [0, 1])
def test_a_long_compile_holds_up_no_other_request(depth: int, gate: Gate) -> None:
    core = guided_core(depth)
    core.add([request(1, choice("later")), plain(2), request(3, choice("red")), request(4, choice("later"))])
    assert drive(core, {2, 3}) == {2: Finish.LENGTH, 3: Finish.STOP}
    assert core.busy
    gate.open.set()
    assert drive(core, {1, 4}) == {1: Finish.STOP, 4: Finish.STOP}
    assert gate.compiled.count(choice("later")) == 1


def test_an_aborted_request_leaves_no_guide_behind(gate: Gate) -> None:
    core = guided_core()
    core.add([request(1, choice("later")), plain(2)])
    core.abort([1])
    gate.open.set()
    wait_until(lambda: not core._guides._made.empty(), SECONDS, "the guide")
    assert drive(core, {2}) == {1: Finish.ABORT, 2: Finish.LENGTH}
    assert core._guides._made.empty()


def test_a_live_request_counts_as_waiting_while_its_guide_is_made(gate: Gate) -> None:
    core = guided_core()
    held = request(1, choice("later"))
    held.live = True
    core.add([held, request(2, choice("later")), plain(3)])
    core.step()
    assert core.scheduler.has_live
    core.abort([1])
    core.step()
    assert not core.scheduler.has_live
    gate.open.set()
    drive(core, {2, 3})


def test_a_request_that_waits_for_its_guide_can_be_aborted(gate: Gate) -> None:
    core = guided_core()
    core.add([request(1, choice("later")), request(2, choice("later"))])
    core.add([plain(3)])
    core.abort([1, 77])
    assert drive(core, {1, 3})[1] is Finish.ABORT
    gate.open.set()
    assert drive(core, {2}) == {2: Finish.STOP}
    assert not core.busy
    core.add([request(1, choice("later"))])
    assert drive(core, {1}) == {1: Finish.STOP}


def test_the_loop_waits_for_a_guide_without_work_and_goes_on_with_it(gate: Gate) -> None:
    core = guided_core()
    inbox: SimpleQueue[ToCore] = SimpleQueue()
    outputs: list[StepOutput] = []
    steps, step = [], core.step

    def counted() -> StepOutput | None:
        steps.append(1)
        return step()

    core.step = counted  # type: ignore[method-assign]
    loop = threading.Thread(target=core.run, args=(inbox, outputs.append), daemon=True)
    loop.start()
    inbox.put(SetVocabulary(TOKENS))
    inbox.put(AddRequests([request(1, choice("later")), request(2, choice("later"))]))
    inbox.put(AbortRequests([2]))
    wait_until(lambda: any(finished(output) == {2: Finish.ABORT} for output in outputs), SECONDS, "the abort")
    assert len(steps) < 5
    gate.open.set()
    wait_until(lambda: finished(outputs[-1]) == {1: Finish.STOP}, SECONDS, "the answer")
    inbox.put(Shutdown())
    loop.join(SECONDS)
    assert not loop.is_alive()


def test_a_grammar_is_compiled_once_and_its_copies_do_not_meet() -> None:
    core = guided_core()
    grammar = regex("[a-z]{4}[0-9]")
    first = answer(core, request(1, grammar))
    assert core._guides._compiled.keys() == {grammar}
    assert answer(core, request(1, grammar)) == first
    assert core._guides._compiled.keys() == {grammar}
    assert threading.stack_size() == 0


def test_a_schema_of_many_steps_fits_the_stack() -> None:
    """A usual stack would overflow, and end the process."""
    chain = {f"d{step}": {"allOf": [{"$ref": f"#/$defs/d{step + 1}"}]} for step in range(3000)}
    got = answer(guided_core(), request(1, schema({"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {"const": "a"}}})))
    assert (written(got), got.error) == (b'"a"', "")


def test_a_token_outside_the_vocabulary_is_refused_before_it_is_replayed() -> None:
    one = request(1, choice("red"), GREEDY)
    one.output_token_ids = [100_000]
    got = answer(guided_core(), one)
    assert got.finish is Finish.INVALID


def test_of_large_grammars_fewer_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = [choice(f"red{number}") for number in range(4)]
    monkeypatch.setattr("workers.engine.guides.compiler._COMPILED_CHARACTERS", 2 * len(grammars[0]))
    core = guided_core()
    for grammar in grammars:
        assert answer(core, request(1, grammar)).finish is Finish.STOP
    assert list(core._guides._compiled) == grammars[2:]
    large = choice("blue", *("x" * number for number in range(1, 30)))
    assert answer(core, request(1, large)).finish is Finish.STOP
    assert list(core._guides._compiled) == [large]


def test_a_grammar_whose_lexer_is_used_up_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies share the lexer's states: else all later requests would fail with the first."""
    limits = LLParserLimits(max_lexer_states=400)

    def compile_small(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
        return LLMatcher(vocabulary.library, grammar, log_level=0, limits=limits)

    monkeypatch.setattr(Vocabulary, "compile", compile_small)
    core, grammar = guided_core(), regex("(.*e.{40})|(.*a.{50})")
    ends = [answer(core, request(number, grammar)) for number in range(12)]
    failed = [number for number, end in enumerate(ends) if end.finish is Finish.INVALID]
    print(failed, [len(end.tokens) for end in ends])
    assert failed
    assert "too many states" in ends[failed[0]].error
    assert all(ends[number + 1].tokens for number in failed if number + 1 < len(ends))


class Panic(BaseException):
    """Derives from `BaseException`, as what the library's Rust code raises does."""


def test_a_library_that_panics_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object) -> LLMatcher:
        raise Panic("an index is out of range")

    monkeypatch.setattr(Vocabulary, "compile", panic)
    got = answer(guided_core(), request(1, choice("red")))
    assert (got.finish, got.error) == (Finish.INVALID, f"{_NOT_COMPILED}an index is out of range")
