"""Create the guides of new requests: threads compile the grammars while steps run."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from workers.engine.guides.guide import Guide, error_of
from workers.engine.guides.guide_threads import GuideThreads
from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.core import EngineRequest, Finish, OutputGuide

if TYPE_CHECKING:
    from llguidance import LLMatcher

_THREADS = 4
"""Most grammars compiled at the same time, so that a slow one does not delay all others."""
_STACK = 64 << 20
"""Bytes of a compiler thread's stack: the recursion is as deep as the schema."""
_COMPILED = 128
"""Most compiled grammars in the cache."""
_COMPILED_CHARACTERS = 1 << 22
"""Most characters of their texts; a compiled grammar takes some hundred times its text."""

_NOT_COMPILED = "the output's grammar cannot be compiled: "


class GuideRefusal(NamedTuple):
    """The reason why there is no guide, as a sentence."""

    error: str
    finish: Finish = Finish.INVALID


Made = Guide | GuideRefusal
T = TypeVar("T")


class GuideCompiler:
    """Creates the guides of requests; a request waits here until its guide is ready.

    Compiled grammars are cached by their text; each request works on a copy. `woken` is called, in
    another thread, when a request's guide is ready.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int], guide_threads: GuideThreads) -> None:
        self.woken: Callable[[], None] = lambda: None
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._guide_threads = guide_threads
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._waiting: dict[int, EngineRequest] = {}
        self._made: SimpleQueue[tuple[EngineRequest, Made]] = SimpleQueue()

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary of all guides."""
        if self._vocabulary is None:
            raise RuntimeError("there is no vocabulary yet")
        return self._vocabulary

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for their guides."""
        return len(self._waiting)

    @property
    def live_wait(self) -> bool:
        """Return whether a live request waits for its guide."""
        return any(request.live for request in self._waiting.values())

    def set_vocabulary(self, tokens: list[bytes]) -> None:
        self._vocabulary = Vocabulary(tokens, self._vocab_size)
        self._compiled.clear()

    def submit(self, request: EngineRequest) -> None:
        """Start to create the guide of a request."""
        if request.request_id in self._waiting:
            raise ValueError(f"request id {request.request_id} is in use")
        self._waiting[request.request_id] = request
        spec = request.guide
        if spec is None or self._vocabulary is None:
            reason = "an output with a grammar needs the vocabulary's text, which has not been sent"
            self._hand_over(request, GuideRefusal(reason, Finish.ERROR))
        else:
            self._create(request, spec, self._compile(spec.grammar) if spec.grammar else None)

    def _create(self, request: EngineRequest, spec: OutputGuide, compiled: Future[LLMatcher] | None) -> None:
        """Create a guide: at once if that is quick, else in a compiling thread."""
        if compiled is not None and not compiled.done():
            compiled.add_done_callback(partial(self._make, request, spec))
        elif request.output_token_ids:
            self._in_thread(partial(self._make, request, spec, compiled))
        else:
            made = self._made_of(request, spec, compiled)
            if isinstance(made, Guide):
                self._guide_threads.begin(made)
            self._hand_over(request, made)

    def forget(self, grammar: str) -> None:
        """Drop a compiled grammar, so that its next request compiles it again.

        All copies of a compiled grammar share the states of its lexer. The number of states is
        limited; when it is reached, every copy fails.
        """
        self._compiled.pop(grammar, None)

    def abort(self, request_id: int) -> EngineRequest | None:
        """Remove and return a waiting request, or return None."""
        return self._waiting.pop(request_id, None)

    def take_made(self, wait: bool = False) -> list[tuple[EngineRequest, Made]]:
        """Return the requests whose guides became ready since the last call, with the guides.

        With `wait`, wait for at least one.
        """
        taken: list[tuple[EngineRequest, Made]] = []
        while True:
            try:
                request, made = self._made.get(block=wait and bool(self._waiting) and not taken)
            except Empty:
                break
            if self._waiting.get(request.request_id) is request:
                del self._waiting[request.request_id]
                taken.append((request, made))
        return taken

    def _compile(self, grammar: str) -> Future[LLMatcher]:
        """Return a grammar's matcher; only copies of it are advanced."""
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

    def _in_thread(self, work: Callable[[], T]) -> Future[T]:
        before = threading.stack_size(_STACK)  # for threads that start from here on
        try:
            return self._threads.submit(work)
        finally:
            threading.stack_size(before)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, "grammars")

    def _make(self, request: EngineRequest, spec: OutputGuide, compiled: Future[LLMatcher] | None) -> None:
        """Create a guide and its first mask."""
        made = self._made_of(request, spec, compiled)
        if isinstance(made, Guide):
            made.prepare()
        self._hand_over(request, made)

    def _made_of(self, request: EngineRequest, spec: OutputGuide, compiled: Future[LLMatcher] | None) -> Made:
        """Return a guide that works on a copy of a compiled grammar."""
        try:
            matcher = None if compiled is None else compiled.result().deep_copy()
            error = "" if matcher is None else error_of(matcher)
            return GuideRefusal(_NOT_COMPILED + error) if error else self._guide(request, spec, matcher)
        except BaseException as error:  # includes the library's panics: the request must not wait forever
            return GuideRefusal(f"{_NOT_COMPILED}{error}")

    def _guide(self, request: EngineRequest, spec: OutputGuide, matcher: LLMatcher | None) -> Made:
        stops = frozenset(request.sampling.stop_token_ids)
        ends = stops if request.sampling.ignore_eos else stops | self._eos_token_ids
        guide = Guide(spec, self.vocabulary, matcher, ends)
        if spec.reasoning_budget >= 0 and spec.in_reasoning and not self.vocabulary.spell(spec.reasoning_end.encode()):
            return GuideRefusal(f"the vocabulary has no tokens for {spec.reasoning_end!r}, which ends the reasoning")
        error = guide.replay(request.output_token_ids)
        return GuideRefusal(error) if error else guide

    def _hand_over(self, request: EngineRequest, made: Made) -> None:
        self._made.put((request, made))
        self.woken()
