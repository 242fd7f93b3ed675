"""Imports point down only: recipes -> actors -> {sandbox, scheduler} -> rstar_ray; each room keeps to its packages."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
ROOMS = {"rstar_ray", "sandbox", "scheduler", "actors", "recipes"}
BELOW = {
    "rstar_ray": set(),
    "sandbox": {"rstar_ray"},
    "scheduler": {"rstar_ray"},
    "actors": {"rstar_ray", "sandbox", "scheduler"},
    "recipes": {"rstar_ray", "sandbox", "scheduler", "actors"},
}
FOREIGN = {
    "rstar_ray": {"ray", "vllm", "deepspeed", "aiohttp"},
    "sandbox": {"ray", "torch", "vllm", "deepspeed"},
    "scheduler": {"ray", "torch", "vllm", "deepspeed", "aiohttp", "socket", "asyncio"},
    "actors": set(),
    "recipes": set(),
}
TORCH_ALLOWED = {"rstar_ray/batch.py", "rstar_ray/loss.py", "rstar_ray/tiny/model.py"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def modules(room: str) -> list[Path]:
    return sorted((REPOSITORY / room).rglob("*.py"))


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_the_rooms_below_it(room: str):
    for path in modules(room):
        for name in imports(path):
            top = name.partition(".")[0]
            if top in ROOMS and top != room:
                assert top in BELOW[room], f"{path.relative_to(REPOSITORY)} imports {name}"


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_keeps_to_its_packages(room: str):
    for path in modules(room):
        where = str(path.relative_to(REPOSITORY))
        for name in imports(path):
            top = name.partition(".")[0]
            assert top not in FOREIGN[room], f"{where} imports {name}"
            if room == "rstar_ray" and top == "torch":
                assert where in TORCH_ALLOWED, f"{where} imports torch"


def test_recipes_do_not_start_each_other():
    for path in modules("recipes"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("recipes"):
                assert "main" not in {alias.name for alias in node.names}, path


def test_no_room_holds_a_grab_bag():
    names = {path.stem for room in ROOMS for path in modules(room)}
    assert not names & {"utils", "util", "helpers", "misc", "common"}
