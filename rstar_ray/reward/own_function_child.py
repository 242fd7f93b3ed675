"""The process with a user's reward function: pickled questions on stdin, answers as JSON lines on stdout."""

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any

from rstar_ray.config.own_code import is_missing, takes_third
from rstar_ray.errors import ConfigError, one_line
from rstar_ray.trajectory import Problem, Transcript

PR_SET_PDEATHSIG = 1
CALLED_AS = "write it as (completion, problem) or (completion, problem, rollout)"
Question = tuple[int, float, str, Problem, Transcript | None]
"""A number for the answer, the deadline [s], and the arguments; the rollout only where the function takes it."""
Answer = dict[str, Any]


class Unusable(Exception):
    """Why the function cannot be used as a reward, with a hint."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.problem, self.hint = problem, hint


def main(name: str) -> None:
    """Answer until stdin ends. What the function prints goes to stderr."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the worker
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a program that the function starts reads no questions

    def say(answer: Answer) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        function, takes_rollout = find_function(name)
    except Unusable as refused:
        say({"error": refused.problem, "hint": refused.hint})
        return
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    say({"is_async": is_async, "takes_rollout": takes_rollout})
    if is_async:
        asyncio.run(_judge_at_once(function, asked, say))
    else:
        for question in _questions(asked):
            say(_judge(function, question))


def find_function(name: str) -> tuple[Callable[..., Any], bool]:
    """Import `module:function`, and whether it takes the rollout as its third argument. Raises `Unusable`."""
    module, _, attribute = name.partition(":")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as absent:
        hint = "" if is_missing(module, absent) else f"install it, or fix {module}"
        raise Unusable(one_line(absent), hint) from absent
    except ConfigError as refused:  # such as a Tool beside the function
        raise Unusable(f"importing {module}: {refused.field}: {refused.problem}", refused.hint) from refused
    except Exception as raised:
        raise Unusable(f"importing {module}: {one_line(raised)}", f"fix the module {module}") from raised
    function = getattr(imported, attribute, None)
    if function is None:
        raise Unusable(f"module {module!r} has no attribute {attribute!r}", f"name a function of {imported.__file__}")
    if not callable(function):
        raise Unusable(f"{attribute} is not a function", f"name a function of {imported.__file__}")
    try:
        signature = inspect.signature(function)
        takes_rollout = takes_third(signature, "rollout")
        signature.bind("completion", None, *((None,) if takes_rollout else ()))
    except (TypeError, ValueError) as misfit:
        raise Unusable(f"{attribute} cannot be called with two or three arguments ({misfit})", CALLED_AS) from misfit
    return function, takes_rollout


def _questions(asked: IO[bytes]) -> Iterator[Question]:
    while True:
        try:
            yield pickle.load(asked)
        except EOFError:
            return


def _judge(function: Callable[..., Any], question: Question) -> Answer:
    number, _, *arguments = question
    try:
        value = function(*_without_absent(arguments))
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return {"id": number} | _scored(value)
    except Exception as raised:
        return {"id": number, "error": one_line(raised)}


async def _judge_at_once(function: Callable[..., Any], asked: IO[bytes], say: Callable[[Answer], None]) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def judge(question: Question) -> None:
        number, deadline_s, *arguments = question
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                value = await function(*_without_absent(arguments))
            say({"id": number} | _scored(value))
        except (Exception, asyncio.CancelledError) as raised:  # a function may cancel itself
            late = isinstance(raised, TimeoutError) and limit.expired()
            say({"id": number, "error": f"no answer within {deadline_s:g} s" if late else one_line(raised)})

    def begin(question: Question) -> None:
        task = loop.create_task(judge(question))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        for question in _questions(asked):
            loop.call_soon_threadsafe(begin, question)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


async def _awaited(value: Any) -> Any:
    return await value


def _without_absent(arguments: list[Any]) -> list[Any]:
    """The rollout is None where the function does not take it."""
    return arguments[:2] if arguments[2] is None else arguments


def _scored(value: Any) -> Answer:
    """A number, or a dict with the number as `reward` and other components beside it."""
    if not isinstance(value, dict):
        return {"reward": _plain(value)}
    components: dict[str, float] = {}
    for name, one in value.items():
        if name != "reward":
            try:
                components[str(name)] = float(one)
            except (TypeError, ValueError) as wrong:
                raise type(wrong)(f"component {str(name)!r}: {wrong}") from wrong
    return {"reward": _plain(value.get("reward")), "components": components}


def _plain(value: Any) -> float | bool | str | None:
    """Values for JSON: numbers of other types, such as numpy's, become floats."""
    return value if value is None or isinstance(value, bool | str) else float(value)


if __name__ == "__main__":
    main(sys.argv[1])
