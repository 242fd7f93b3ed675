"""From `--tools.use` and `--tools.environment` to tools: imported once in a separate process, to look at them.

Run as `python -m rstar_ray.tools.loader ENTRY...` it writes their specs as JSON; so a module that hangs or crashes
when imported is refused in one line, and nothing of it runs where the run is driven from.
"""

import contextlib
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, cast

from rstar_ray.config.own_code import is_missing
from rstar_ray.errors import ConfigError, one_line
from rstar_ray.tools.spec import PYTHON, PYTHON_TOOL, ToolSpec, spec_of
from rstar_ray.tools.tool import Tool, misfit

IMPORT_DEADLINE_S = 60.0
ENVIRONMENT_METHODS = ("start", "reply", "close")
ASYNC_METHODS = {"start": "problem", "reply": "said", "ended": "reason", "restore": "snapshot"}
"""Those of an environment that are awaited, with the argument of each; the last two are optional."""


def tool_specs(entries: Sequence[str], folder: str) -> list[ToolSpec]:
    """The tools of the entries of `--tools.use`, in order; `folder`: folder of their modules.

    Raises `ConfigError` for an entry that cannot be imported, is not a tool, or has the name of another tool.
    """
    own = [entry for entry in entries if entry != PYTHON]
    described = _described("--tools.use", own, folder) if own else {}
    specs = [spec for entry in entries for spec in ([PYTHON_TOOL] if entry == PYTHON else described[entry])]
    for position, spec in enumerate(specs):
        if same := next((other for other in specs[:position] if other.name == spec.name), None):
            wrong = f"{spec.entry or PYTHON} and {same.entry or PYTHON} are both named {spec.name!r}"
            raise ConfigError("--tools.use", wrong, "rename one, or leave it out")
    return specs


def check_environment(entry: str, folder: str, *, option: str = "--tools.environment") -> None:
    """Raises `ConfigError` for an environment that cannot be imported or lacks a method."""
    _described(option, [f"environment {entry}"], folder)


def check_function(entry: str, num_arguments: int, folder: str, *, option: str) -> None:
    """Raise `ConfigError` for a function that cannot be imported or does not take this number of arguments."""
    _described(option, [f"function/{num_arguments} {entry}"], folder)


def load_tools(entry: str) -> list[Tool]:
    """The tool or tools that `module:object` names. Raises `ConfigError`, or an error of the module."""
    found = load_object(entry)
    tools = [found] if isinstance(found, Tool) else found
    if not isinstance(tools, Iterable) or not all(isinstance(tool, Tool) for tool in cast(Iterable[Any], tools)):
        raise ConfigError(entry, "is neither a Tool nor a list of them", "write `name = Tool(...)`, see docs/tools.md")
    return list(cast(Iterable[Tool], tools))


def load_environment(entry: str) -> type[Any]:
    """The environment's class. Raises as `load_tools`."""
    found = load_object(entry)
    for method in ENVIRONMENT_METHODS:
        if not callable(getattr(found, method, None)):
            raise ConfigError(entry, f"has no method {method!r}", f"write {', '.join(ENVIRONMENT_METHODS)}")
    if not isinstance(found, type):
        raise ConfigError(entry, "is not a class", "name the class: each rollout has its own object")
    if misfit(found):
        raise ConfigError(entry, "its constructor needs arguments", "give them defaults; `start` is given the problem")
    for method, argument in ASYNC_METHODS.items():
        function = getattr(found, method, None)
        bound = isinstance(inspect.getattr_static(found, method, None), staticmethod | classmethod)
        arguments = (argument,) if bound else ("self", argument)
        is_async = function is not None and inspect.iscoroutinefunction(inspect.unwrap(function))
        if function is not None and (not is_async or misfit(function, *arguments)):
            wrong = f"its method {method!r} is not async or does not take one argument"
            raise ConfigError(entry, wrong, f"write `async def {method}(self, {argument})`")
    if inspect.iscoroutinefunction(getattr(found, "snapshot", None)):
        raise ConfigError(entry, "its method 'snapshot' is async", "write `def snapshot(self) -> str`")
    return found


def _refuse_function(entry: str, num_arguments: int) -> None:
    """Raise `ConfigError` unless the entry is a function of this number of arguments."""
    found = load_object(entry)
    if not callable(found) or isinstance(found, type) or misfit(found, *map(str, range(num_arguments))):
        raise ConfigError(entry, f"must be a function of {num_arguments} positional arguments", "see docs/agents.md")
    if inspect.isasyncgenfunction(found) or inspect.isgeneratorfunction(found):
        raise ConfigError(entry, "must not be a generator", "write `return`, not `yield`")
    if num_arguments == 1 and inspect.iscoroutinefunction(found):  # `--agent.failed`: a coroutine is always true
        raise ConfigError(entry, "must not be async", "write `def`")


def _file_of(entry: str) -> str:
    """The module's file, since another module may have its name."""
    module = entry.partition(":")[0]
    found = sys.modules.get(module)
    return str(getattr(found, "__file__", None) or f"the module {module}")


def load_object(entry: str) -> Any:
    """Import the object that `module:object` names."""
    module, colon, name = entry.partition(":")
    if not colon or not name:
        raise ConfigError(entry, "is not module:object", "name the module and an object in it")
    return getattr(importlib.import_module(module), name)


def _described(option: str, entries: Sequence[str], folder: str) -> dict[str, list[ToolSpec]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [folder, *sys.path]))}
    command = [sys.executable, "-P", "-m", "rstar_ray.tools.loader", *entries]
    hint = "give module:object, and its folder as --own-folder"
    # Files, not pipes: a process that a module has started may hold a pipe open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)
        try:
            status = child.wait(IMPORT_DEADLINE_S)
        except subprocess.TimeoutExpired:
            wrong = f"importing {', '.join(entries)} takes over {IMPORT_DEADLINE_S:g} s"
            raise ConfigError(option, wrong, hint) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        err.seek(0)
        said = out.read().decode("utf-8", "replace").rpartition("\n\0")[2]
        errors = err.read().decode("utf-8", "replace").strip().splitlines()
    if status or not said:
        raise ConfigError(option, (errors or ["its process ended"])[-1][:300], hint)
    answer, _ = json.JSONDecoder().raw_decode(said)  # the module may print at its exit
    if refused := answer.get("refused"):
        raise ConfigError(f"{option} {refused[0]}", refused[1], refused[2] or hint)
    return {entry: [ToolSpec(**spec) for spec in specs] for entry, specs in answer["specs"].items()}


def main(entries: Sequence[str]) -> None:
    specs: dict[str, list[dict[str, Any]]] = {}
    answer: dict[str, Any] = {"specs": specs}
    for entry in entries:
        try:
            if entry.startswith("environment "):
                load_environment(entry.removeprefix("environment "))
            elif entry.startswith("function/"):
                num_arguments, _, name = entry.removeprefix("function/").partition(" ")
                _refuse_function(name, int(num_arguments))
            else:
                specs[entry] = [asdict(spec_of(tool, entry)) for tool in load_tools(entry)]
                json.dumps(specs[entry])  # refused here, a schema that is not JSON is named
        except ConfigError as refused:
            answer["refused"] = [refused.field, refused.problem, refused.hint]
            break
        except (Exception, SystemExit) as raised:
            specs.pop(entry, None)
            name = entry.rpartition(" ")[2]
            missing = is_missing(name.partition(":")[0], raised)
            answer["refused"] = [name, one_line(raised), "" if missing else f"fix {_file_of(name)}"]
            break
    sys.stdout.write("\n\0" + json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
