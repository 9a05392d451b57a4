"""Makes engine cores ill that are started with this folder on PYTHONPATH: a step with certain
tokens ends, stops, holds or slows the core. They may also note their steps in a file.

Python imports this file when it starts. What does harm is named in the environment, see
`tests/support/poison.py`; processes other than engine cores, and every step without such tokens,
are left as they are.
"""

import ctypes
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from types import ModuleType
from typing import Any

EXECUTOR = "workers.engine.device.executor"
TRANSPORT = "workers.engine.messages.transport"


class Patcher(importlib.abc.MetaPathFinder):
    """Lets the modules of executor and transport be loaded as ever, and then changes what their
    classes do with a step.
    """

    def __init__(self) -> None:
        self._changes = {EXECUTOR: lambda module: make_ill(module.Executor)}
        if os.environ.get("STEP_NOTES"):
            self._changes[TRANSPORT] = lambda module: note_steps(module.FrameSender)

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def make_ill(executor: Any) -> None:
    launch = executor.launch
    poisons = json.loads(os.environ["POISONS"])
    # By slot: prompt and what was generated before it came into this core
    tokens: dict[int, list[int]] = {}

    def ill_launch(self: Any, plan: Any, *masks: Any) -> Any:
        for added in plan.added:
            tokens[added.slot] = list(added.token_ids)
        ends = {slot: start + count for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True)}
        for poison in poisons:
            if any(end >= poison["from"] and contains(tokens[slot], poison["token_ids"]) for slot, end in ends.items()):
                do_harm(poison["harm"])
        return launch(self, plan, *masks)

    executor.launch = ill_launch


def note_steps(sender: Any) -> None:
    from workers.engine.messages.core import Finish

    put = sender.put
    file = open(os.environ["STEP_NOTES"], "a", buffering=1)  # noqa: SIM115

    def noted_put(self: Any, message: Any) -> None:
        put(self, message)
        if type(message).__name__ == "StepOutput":
            ended = [one for one, why in zip(message.request_ids, message.finish, strict=True) if why == Finish.ABORT]
            file.write(json.dumps([time.monotonic(), os.getpid(), message.request_ids, ended]) + "\n")

    sender.put = noted_put


def contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens) - len(part) + 1))


def do_harm(harm: str) -> None:
    if harm == "segfault":
        ctypes.string_at(0)
    elif harm == "exception":
        raise ValueError("the arithmetic went wrong")
    elif harm == "memory":
        raise importlib.import_module("workers.engine.messages.errors").StepOutOfMemory("nothing is left")
    elif harm == "hang":
        time.sleep(3600)
    elif harm == "exit":
        os._exit(3)
    elif harm == "slow":
        time.sleep(0.05)
    elif harm == "crawl":
        time.sleep(2.0)
    elif harm == "hold":
        while os.path.exists(os.environ["HOLD_FILE"]):
            time.sleep(0.005)


if any("core_process" in word for word in sys.orig_argv):
    sys.meta_path.insert(0, Patcher())
