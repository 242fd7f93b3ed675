"""What a person's own code says: the files of the modules that are named, and of what these import beside them.

Nothing is imported to find out: it is a stranger's code, and may hang. What it reads while it runs is not known here.
"""

import ast
import hashlib
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

OURS = Path(__file__).resolve().parents[1]
"""This package: what it computes is not part of what a person changed."""


def own_code(entries: Sequence[str], folder: Path, elsewhere: Sequence[str] = ()) -> dict[str, str]:
    """Digests by module, of those that `module:object` entries name and of what they import from `folder`.

    A named module that is not in `folder` is looked for in the folders `elsewhere`, and what it imports is left alone.
    """
    found: dict[str, str] = {}
    waiting = [(entry.partition(":")[0], [str(folder), *elsewhere]) for entry in entries]
    while waiting:
        module, places = waiting.pop()
        path = module_file(module, places)
        if module in found or path is None or OURS in path.resolve().parents:
            continue
        source = path.read_bytes()
        found[module] = hashlib.blake2b(source, digest_size=8).hexdigest()
        if folder in path.parents:
            waiting += [(name, [str(folder)]) for name in _imported(source, module, path.name == "__init__.py")]
    return found


def module_file(module: str, places: Sequence[str]) -> Path | None:
    """The file that holds a module, with a package's own being its `__init__.py`; None where there is none."""
    inside, file = list(places), None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, inside)
        if spec is None:
            return None
        inside, file = list(spec.submodule_search_locations or ()), spec.origin
    return Path(file).absolute() if file else None


def _imported(source: bytes, module: str, is_package: bool) -> Iterator[str]:
    """Names that may be modules; of `from a import b` both `a` and `a.b`."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # it cannot be imported either, and is refused for that
        return
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name for alias in node.names for name in _with_parents(alias.name))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            for name in (start, *(f"{start}.{alias.name}".lstrip(".") for alias in node.names)):
                yield from _with_parents(name)


def _with_parents(module: str) -> Iterator[str]:
    """`a.b.c` runs `a` and `a.b` first."""
    parts = module.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)) if parts[0])
