"""A thread with an event loop that runs coroutines for callers in other threads."""

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from batch_inference_pipeline.errors import ClientError

T = TypeVar("T")

_LOOK_SECONDS = 0.5
_LAST_SECONDS = 5.0  # for cancelled tasks to end

_threads: set[threading.Thread] = set()


class EventLoopThread:
    """Runs coroutines for callers in other threads.

    `close`, the end of the process, and the object's finalizer end the thread; `at_end` is its
    last coroutine. The finalizer may run in any thread, so it waits for nothing.
    """

    def __init__(self, at_end: Callable[[], Awaitable[None]]) -> None:
        self._is_closed = True
        self._process = os.getpid()
        self._lock = threading.RLock()  # a finalizer may run in the middle of a method
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_DaemonThreads())
        self._waited_for: set[Future[Any]] = set()
        self._stopped = threading.Event()
        work = (self._loop, self._stopped, self._waited_for, at_end)
        self._thread = threading.Thread(target=_work, args=work, name="pipeline-client", daemon=True)
        self._thread.start()
        self._is_closed = False
        _threads.add(self._thread)
        _open.add(self)

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start a coroutine and return its future.

        Raise `ClientError` after `close`, and in a forked process.
        """
        if os.getpid() != self._process:
            work.close()
            raise ClientError("the client belongs to the process that created it: create another after a fork")
        with self._lock:
            if self._is_closed:
                work.close()
                raise ClientError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._waited_for.add(future)
        future.add_done_callback(self._waited_for.discard)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; cancel it if the wait is interrupted.

        Raise the errors of `start`.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientError("the client's own thread cannot wait for itself: call this from another thread")
        future = self.start(work)
        try:
            while not future.done():  # short waits: with polars loaded, Ctrl-C does not interrupt a wait
                _wait(future)
            return future.result()
        except CancelledError:
            raise ClientError("the client is closed") from None
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel the coroutines that callers wait for, and end the thread."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _end(self) -> None:
        if self._is_closed or os.getpid() != self._process:
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(_stop, self._loop, self._stopped)

    def __del__(self) -> None:
        self._end()


class LoopIterator(Iterator[T]):
    """Yields the items of an asynchronous generator of groups.

    `close`, an error and the finalizer run `at_end`, by default the generator's `aclose`.
    """

    def __init__(
        self,
        loop: EventLoopThread,
        groups: AsyncGenerator[Sequence[T], None],
        at_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._loop = loop
        self._groups = _Groups(groups, at_end)
        self._ready: deque[T] = deque()
        self._is_over = False

    def __next__(self) -> T:
        while not self._ready:
            if self._is_over:
                raise StopIteration
            try:
                group = self._loop.run(self._groups.take())
            except BaseException as error:
                if self._is_over and isinstance(error, ClientError):  # another thread has closed it
                    raise StopIteration from None
                self._let_go()
                raise
            if group is None:
                self._is_over = True
            else:
                self._ready.extend(group)
        return self._ready.popleft()

    def close(self) -> None:
        """Stop the iteration, and wait until the generator has ended."""
        self._ready.clear()
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(ClientError):
                self._loop.run(self._groups.close())

    def _let_go(self) -> None:
        if not self._is_over:
            self._is_over = True
            with contextlib.suppress(ClientError):
                self._loop.start(self._groups.close())

    def __del__(self) -> None:
        self._let_go()


class _DaemonThreads(ThreadPoolExecutor):
    """Runs each call in a daemon thread, since an iterator of the caller may block forever.

    Calls, such as lookups of host names, may come until the loop has ended.
    """

    def submit(self, call: Callable[..., T], /, *args: Any, **options: Any) -> "Future[T]":
        future = Future[T]()
        thread = threading.Thread(target=_call, args=(future, call, args, options), name="pipeline-call", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # from Python 3.12 on, no thread starts at interpreter shutdown
            _call(future, call, args, options)
        return future


def _call(future: Future[T], call: Callable[..., T], args: Sequence[Any], options: Mapping[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call(*args, **options))
    except BaseException as error:
        future.set_exception(error)


def _wait(future: Future[Any]) -> None:
    with contextlib.suppress(Exception):
        future.result(_LOOK_SECONDS)


class _Groups(Generic[T]):
    """Serializes access to a generator: a running generator cannot be resumed or closed."""

    def __init__(self, groups: AsyncGenerator[Sequence[T], None], at_end: Callable[[], Awaitable[None]] | None) -> None:
        self._groups = groups
        self._at_end = at_end or groups.aclose
        self._lock = asyncio.Lock()
        self._taking: asyncio.Task[Any] | None = None

    async def take(self) -> Sequence[T] | None:
        async with self._lock:
            self._taking = asyncio.current_task()
            try:
                return await anext(self._groups, None)
            finally:
                self._taking = None

    async def close(self) -> None:
        if self._taking is not None and not self._taking.cancelling():  # a second cancel would interrupt its cleanup
            self._taking.cancel()
        async with self._lock:
            await self._at_end()


def _stop(loop: asyncio.AbstractEventLoop, stopped: threading.Event) -> None:
    stopped.set()
    loop.stop()


def _work(
    loop: asyncio.AbstractEventLoop,
    stopped: threading.Event,
    waited_for: set[Future[Any]],
    at_end: Callable[[], Awaitable[None]],
) -> None:
    try:
        # SystemExit from the caller's iterable ends `run_forever`; the task keeps it as its result
        while not stopped.is_set():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()
        for future in list(waited_for):
            future.cancel()
        ending = loop.create_task(_finish(at_end))
        while not ending.done():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_until_complete(ending)
    finally:
        loop.close()
        _threads.discard(threading.current_thread())


async def _finish(at_end: Callable[[], Awaitable[None]]) -> None:
    try:
        await at_end()
    finally:
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in rest:
                task.cancel()
            await asyncio.wait(rest, timeout=_LAST_SECONDS)


_open: "weakref.WeakSet[EventLoopThread]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for one in list(_open):
        one._end()
    for thread in list(_threads):
        thread.join()
