"""The process that holds a person's reward function: a question a line on stdin, an answer a line on stdout."""

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from rstar_ray.trajectory import Problem

PR_SET_PDEATHSIG = 1


def main(name: str) -> None:
    """Answer until stdin ends. What the function prints goes to stderr."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # not to outlive the worker, whatever it does
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        reward = find_function(name)
    except Exception as refused:
        say({"error": _in_one_line(refused)})
        return
    say({"ready": True})
    for line in sys.stdin:
        say(_judged(reward, json.loads(line)))


def find_function(name: str) -> Callable[[str, Problem], Any]:
    """Import `module:function`. Raises whatever the module raises, AttributeError or TypeError."""
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{attribute} is no function")
    inspect.signature(function).bind("completion", None)
    return function


def _judged(reward: Callable[[str, Problem], Any], question: dict[str, Any]) -> dict[str, Any]:
    try:
        value: Any = reward(question["completion"], Problem(**question["problem"]))
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return {"reward": value if value is None or isinstance(value, bool) else float(value)}
    except Exception as raised:
        return {"error": _in_one_line(raised)}


def _in_one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1][:200] if lines else ''}"


if __name__ == "__main__":
    main(sys.argv[1])
