"""Guides of requests that have just come: their grammars are compiled beside the steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from workers.engine.guides.guide import Guide, error_of
from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.core import EngineRequest, OutputGuide

if TYPE_CHECKING:
    from llguidance import LLMatcher

_THREADS = 4
"""Grammars compiled at the same time, so that one that takes long does not hold up all others."""
_STACK = 64 << 20
"""Bytes of stack: a grammar is compiled by recursion, as deep as its schema."""
_COMPILED = 128
"""Compiled grammars that are kept."""
_COMPILED_CHARACTERS = 1 << 22
"""How long all of them may be together: one takes up to some hundred times its text in memory."""

_NOT_COMPILED = "the output's grammar cannot be compiled: "

Made = Guide | str
"""A guide, or a sentence that says why there is none."""


class GuideCompiler:
    """Makes the guides of requests, which wait here meanwhile.

    A compiled grammar is kept by its text; each request works on a copy. `woken` is called, in
    another thread, when a request has its guide.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.woken: Callable[[], None] = lambda: None
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._waiting: dict[int, EngineRequest] = {}
        self._made: SimpleQueue[tuple[EngineRequest, Made]] = SimpleQueue()

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of all guides made here."""
        if self._vocabulary is None:
            raise RuntimeError("there is no vocabulary yet")
        return self._vocabulary

    @property
    def waiting(self) -> int:
        """Requests that wait for their guides."""
        return len(self._waiting)

    @property
    def live_wait(self) -> bool:
        """Return whether a live one is among them."""
        return any(request.live for request in self._waiting.values())

    def set_vocabulary(self, tokens: list[bytes]) -> None:
        self._vocabulary = Vocabulary(tokens, self._vocab_size)
        self._compiled.clear()

    def submit(self, request: EngineRequest) -> None:
        """Have the guide of a request made."""
        if request.request_id in self._waiting:
            raise ValueError(f"request id {request.request_id} is in use")
        self._waiting[request.request_id] = request
        spec = request.guide
        if spec is None or self._vocabulary is None:
            self._hand_over(request, "an output with a grammar needs the vocabulary's text, which has not been sent")
        elif spec.grammar:
            self._compile(spec.grammar).add_done_callback(partial(self._make, request, spec))
        else:
            self._hand_over(request, self._guide(request, spec, None))

    def forget(self, grammar: str) -> None:
        """Compile a grammar anew when it is next asked for.

        All copies of a compiled grammar share the states of its lexer. Their number is limited, and
        where it is used up every copy fails.
        """
        self._compiled.pop(grammar, None)

    def abort(self, request_id: int) -> EngineRequest | None:
        """Return a request that waited here and does so no more."""
        return self._waiting.pop(request_id, None)

    def take_made(self, wait: bool = False) -> list[tuple[EngineRequest, Made]]:
        """Return the requests whose guides are there since the last call, with these.

        With `wait`, return once there is one.
        """
        taken: list[tuple[EngineRequest, Made]] = []
        while self._waiting:
            try:
                request, made = self._made.get(block=wait and not taken)
            except Empty:
                break
            if self._waiting.get(request.request_id) is request:
                del self._waiting[request.request_id]
                taken.append((request, made))
        return taken

    def _compile(self, grammar: str) -> Future[LLMatcher]:
        """Return a grammar's matcher, which is never advanced itself."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._in_thread(partial(self.vocabulary.compile, grammar))
            self._keep(grammar, compiled)
        self._compiled.move_to_end(grammar)
        return compiled

    def _keep(self, grammar: str, compiled: Future[LLMatcher]) -> None:
        others = self._compiled
        while others and (len(others) >= _COMPILED or sum(map(len, others)) + len(grammar) > _COMPILED_CHARACTERS):
            others.popitem(last=False)
        others[grammar] = compiled

    def _in_thread(self, work: Callable[[], LLMatcher]) -> Future[LLMatcher]:
        before = threading.stack_size(_STACK)  # of threads that are started from here on
        try:
            return self._threads.submit(work)
        finally:
            threading.stack_size(before)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, "grammars")

    def _make(self, request: EngineRequest, spec: OutputGuide, compiled: Future[LLMatcher]) -> None:
        """Take a compiled grammar, in the thread that compiled it or, if it was there, at once."""
        made: Made
        try:
            matcher = compiled.result().deep_copy()
            error = error_of(matcher)
            made = _NOT_COMPILED + error if error else self._guide(request, spec, matcher)
        except BaseException as error:  # the library's panics too: the request must not wait for ever
            made = f"{_NOT_COMPILED}{error}"
        self._hand_over(request, made)

    def _guide(self, request: EngineRequest, spec: OutputGuide, matcher: LLMatcher | None) -> Made:
        stops = frozenset(request.sampling.stop_token_ids)
        ends = stops if request.sampling.ignore_eos else stops | self._eos_token_ids
        guide = Guide(spec, self.vocabulary, matcher, ends)
        if spec.reasoning_budget >= 0 and spec.in_reasoning and not self.vocabulary.spell(spec.reasoning_end.encode()):
            return f"the vocabulary has no tokens for {spec.reasoning_end!r}, which ends the reasoning"
        return guide.replay(request.output_token_ids) or guide

    def _hand_over(self, request: EngineRequest, made: Made) -> None:
        self._made.put((request, made))
        self.woken()
