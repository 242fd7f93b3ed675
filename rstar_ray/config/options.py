"""A command line as the options of a dataclass; what is wrong with one is a line, as everywhere."""

import contextlib
import io
import re
import shlex
from collections.abc import Sequence
from dataclasses import make_dataclass, replace
from typing import Any, TypeVar, cast, get_type_hints

from rstar_ray.errors import ConfigError

Options = TypeVar("Options")


def spelled(name: str, *value: Any) -> str:
    """A setting as the command line has it, by its dotted name: the option alone, or with a value.

    >>> spelled("rollout.max_turns", 3), spelled("rollout.instruct", False), spelled("tools.use")
    ('--rollout.max-turns 3', '--rollout.no-instruct', '--tools.use')
    """
    branch, dot, leaf = name.replace("_", "-").rpartition(".")
    option = f"--{branch}{dot}{leaf}"
    if value and isinstance(value[0], bool):
        return option if value[0] else f"--{branch}{dot}no-{leaf}"
    words = cast(tuple[Any, ...], value[0]) if value and isinstance(value[0], tuple) else value
    return shlex.join([option, *map(str, words)])


def options_of(
    kind: type[Options],
    argv: Sequence[str] | None,
    *,
    default: Options | None = None,
    program: str | None = None,
    description: str | None = None,
) -> Options:
    """Tyro, with its framed message made one line; `argv` None is the process's own. Raises `ConfigError`."""
    import tyro

    args = None if argv is None else list(argv)
    if default is not None and args is not None and (found := _of_branches(kind, args, default)) is not None:
        return found
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            if default is None:
                return tyro.cli(kind, args=args, prog=program, description=description)
            return tyro.cli(kind, default=default, args=args, prog=program, description=description)
    except SystemExit as end:
        if not end.code:
            raise
        raise _as_config_error(complaint.getvalue()) from None


def _of_branches(kind: type[Options], args: list[str], default: Options) -> Options | None:
    """The same from a parser of no more than the branches that are asked for, which is built in a fifth of the time of
    a whole run's or less. None for help, and for what is wrong: a parser that knows all options tells of them."""
    import tyro

    branches = {word[2:].partition("=")[0].partition(".")[0].replace("-", "_") for word in args if word[:2] == "--"}
    hints = get_type_hints(kind, include_extras=True)
    if not branches or branches - hints.keys():
        return None
    part: Any = make_dataclass(kind.__name__, [(name, hints[name]) for name in branches])
    some = part(**{name: getattr(default, name) for name in branches})
    without_help = (tyro.conf.HelptextFromCommentsOff,)  # it is read from the sources, which takes as long again
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            asked = tyro.cli(part, default=some, args=args, config=without_help)
        return cast(Options, replace(cast(Any, default), **{name: getattr(asked, name) for name in branches}))
    except (SystemExit, ValueError):
        return None


def _as_config_error(complaint: str) -> ConfigError:
    lines = [line.strip(" │|╭╮╰╯─") for line in complaint.splitlines()[1:]]  # the first is a title
    lines = ["" if set(line) <= {"-"} else line for line in lines]  # the rules of a terminal without UTF-8
    begin = next((number for number, line in enumerate(lines) if line), 0)
    rule = next((number for number, line in enumerate(lines) if number > begin and not line), len(lines))
    text = " ".join(lines[begin:rule])
    text = re.sub(r"^Error parsing \S+: (?=--)", "", text)
    if match := re.match(r"Unrecognized options: (\S+?),? ", text + " "):
        meant = re.findall(r"--[\w.-]+", " ".join(lines[rule:]))
        mend = f"perhaps {meant[0]}" if meant and meant[0] != "--help" else "see --help"
        return ConfigError(match[1], "no such option", f"{mend}; --help lists all")
    if match := re.match(r"(--[\w.-]+): (.*); (.*)", text):
        return ConfigError(match[1], match[2], match[3])
    if match := re.match(r"Error parsing (--[\w.-]+): (.*)", text):
        return ConfigError(match[1], match[2], "see --help for its type")
    if match := re.match(r"Missing value for argument '(--[\w.-]+)'", text):
        return ConfigError(match[1], "needs a value", "see --help for its type")
    if match := re.match(r"invalid choice (.*) for argument '(--[\w.-]+)'\. (.*)", text):
        return ConfigError(match[2], f"{match[1]} is no choice", match[3].rstrip(". ").lower())
    return ConfigError("command line", text or "it could not be read", "see --help")
