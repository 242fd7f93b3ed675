"""The command-line parser: tyro over a dataclass of options, with one-line errors.

`--config FILE` reads options from a TOML file of the same tree. The command line overrides the file.
"""

import difflib
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast, get_type_hints

from rstar_ray.config.tree import RENAMED
from rstar_ray.errors import ConfigError
from rstar_ray.exit_status import exit_status_of

Options = TypeVar("Options")
CONFIG = "--config"
HELP = {"-h", "--help"}


def spelled(name: str, *value: Any) -> str:
    """The command-line spelling of a setting, by its dotted name: the option alone, or with a value.

    >>> spelled("rollout.max_turns", 3), spelled("rollout.instruct", False), spelled("tools.use")
    ('--rollout.max-turns 3', '--rollout.no-instruct', '--tools.use')
    """
    return shlex.join(_words(name, *value))


def _words(name: str, *value: Any) -> list[str]:
    branch, dot, leaf = name.replace("_", "-").rpartition(".")
    option = f"--{branch}{dot}{leaf}"
    if value and isinstance(value[0], bool):
        return [option if value[0] else f"--{branch}{dot}no-{leaf}"]
    listed = bool(value) and isinstance(value[0], tuple | list)
    return [option, *map(str, cast(Sequence[Any], value[0]) if listed else value)]


RENAMED_OPTIONS = {
    "--when-short": "--on-insufficient-resources fail or scale-down",
    **{spelled(old): spelled(new) for old, new in RENAMED.items()},
}
"""Options of earlier versions, with their current names."""


def given(argv: Sequence[str]) -> set[str]:
    """The option names of a command line, as the help spells them."""
    return {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}


def with_config_file(argv: Sequence[str]) -> list[str]:
    """The command line, preceded by the options of the file that `--config` names, so that the command line
    overrides the file.

    Raises `ConfigError` for a file that cannot be read as TOML.
    """
    of_file, own = split_config_file(argv)
    first_option = next((number for number, word in enumerate(own) if word.startswith("-")), len(own))
    return [
        *own[:first_option],
        *of_file,
        *own[first_option:],
    ]  # a list at the end of the file must not take positional arguments


def split_config_file(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of the file that `--config` names, as words, and the command line without `--config`.

    Raises `ConfigError` for a file that cannot be read as TOML, and for a second `--config`.
    """
    own = list(argv)
    places = [number for number, word in enumerate(own) if word.partition("=")[0] == CONFIG]
    if not places:
        return [], own
    if len(places) > 1:
        raise ConfigError(CONFIG, f"given {len(places)} times", "give one file")
    _, equals, path = own.pop(places[0]).partition("=")
    if not equals:
        path = own.pop(places[0]) if places[0] < len(own) else ""
    try:
        tree = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as unreadable:
        raise ConfigError(CONFIG, f"{path!r} cannot be read ({unreadable})", "give a TOML file") from unreadable
    return [word for name, value in _flat(tree) for word in _written(name, value)], own


def _written(name: str, value: Any) -> list[str]:
    """A setting of a file as command-line words. `--name=value` keeps a value that begins with a dash."""
    if isinstance(value, list):
        for one in cast(list[Any], value):
            if str(one).startswith("-"):
                raise ConfigError(
                    f"{CONFIG}, {name}", f"{one!r} would be read as an option", "write it without the dash"
                )
    if isinstance(value, bool | list):
        return _words(name, value)
    return [f"{_words(name)[0]}={value}"]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(cast(dict[str, Any], value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def as_toml(values: Mapping[str, Any]) -> str:
    """Settings, by their dotted names, as TOML that `--config` can read.

    >>> print(as_toml({"steps": 3, "tools.use": ("python",), "tools.hosts": 1}), end="")
    steps = 3
    <BLANKLINE>
    [tools]
    use = ["python"]
    hosts = 1
    """
    tables: dict[str, list[str]] = {"": []}
    for name, value in values.items():
        table, _, leaf = name.rpartition(".")
        written = str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
        tables.setdefault(table, []).append(f"{leaf} = {written}\n")
    return "\n".join("".join([f"[{table}]\n" if table else "", *lines]) for table, lines in tables.items())


def options_of(
    kind: type[Options],
    argv: Sequence[str] | None,
    *,
    default: Options | None = None,
    program: str | None = None,
    description: str | None = None,
) -> Options:
    """The options of a command line; `argv` None is the process's own. Raises `ConfigError`."""
    import tyro
    from tyro import _errors as errors  # private: written for tyro 1.0, to which pyproject.toml keeps

    args = with_config_file(sys.argv[1:] if argv is None else argv)
    if description is not None:
        description += "\n\n--config FILE: options from a TOML file of the same tree; the command line wins over it."
    # Reading help texts from the sources takes four times as long as the rest of parsing.
    config = () if HELP & set(args) else (tyro.conf.HelptextFromCommentsOff,)
    among: dict[str, Any] = {} if default is None else {"default": default}
    with errors.on_parse_error(lambda event: _refuse(event, kind)):
        return tyro.cli(kind, args=args, prog=program or _program(), description=description, config=config, **among)


def _program() -> str:
    """The command as the user started it: a script, or `python -m` and a package."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.endswith(".__main__"):
        return f"python -m {spec.parent}"
    return Path(sys.argv[0] or "command").name


def run_command(
    kind: type[Options], act: Callable[[Options], int | None], argv: Sequence[str] | None, *, description: str | None
) -> int:
    """The `main` of a small command; returns the exit status (`rstar_ray.exit_status`)."""
    return exit_status_of(lambda: act(options_of(kind, argv, description=description)))


def _refuse(event: Any, kind: type) -> NoReturn:
    """Raise a `ConfigError` for tyro's error, or the original one if a check of the options raised it."""
    cause = sys.exception()
    while cause is not None:
        if isinstance(cause, ConfigError):
            raise cause
        cause = cause.__context__
    argument = getattr(event, "argument", None)
    option = argument.display_name().partition("/")[0] if argument is not None else "command line"
    match type(event).__name__:
        case "UnrecognizedArgs":
            option = event.tokens[0].partition("=")[0]
            if new := RENAMED_OPTIONS.get(option.replace("_", "-")):
                raise ConfigError(option, "was renamed", f"use {new}")
            known = [spelled(name) for name in _names(kind)]
            close = difflib.get_close_matches(option, known, n=1, cutoff=0.7) if option.startswith("--") else []
            hint = f"perhaps {close[0]}" if close else "see --help"
            raise ConfigError(option, "no such option", f"{hint}; --help lists all")
        case "InvalidChoice":
            raise ConfigError(option, f"not a choice (got {event.value!r})", f"choose {', '.join(event.choices)}")
        case "BadValue":
            raise ConfigError(option, "needs a value", "see --help for its type")
        case "MissingArgs":
            missing = event.missing_arguments[0].arg.display_name()
            raise ConfigError(missing if missing.startswith("--") else missing.upper(), "is required", "see --help")
        case _:
            message = str(getattr(event, "message", event))
            if number := re.search(r"(literal for int|string to float).*: ('.*')", message):
                wanted = "an integer" if "int" in number[1] else "a number"
                raise ConfigError(option, f"{number[2]} is not {wanted}", f"use {wanted}; see --help")
            raise ConfigError(option, message, "see --help for its type")


def _names(kind: type) -> Iterator[str]:
    hints = get_type_hints(kind)
    for item in fields(cast(Any, kind)):
        inner = hints[item.name]
        if isinstance(inner, type) and is_dataclass(inner):
            yield from (f"{item.name}.{name}" for name in _names(inner))
        else:
            yield item.name
