"""Imports point down only: recipes -> actors -> {sandbox, scheduler} -> rstar_ray; each room keeps to its packages."""

import ast
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

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
TORCH_ALLOWED = {
    "rstar_ray/algorithm/batch.py",
    "rstar_ray/algorithm/loss.py",
    "rstar_ray/algorithm/off_policy.py",
    "rstar_ray/algorithm/surrogate.py",
    "rstar_ray/tiny/tiny_model.py",
}

WARM = {"numpy", "scipy", "sympy", "math_verify"}
"""What warm servers import for programs."""


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> dict[type[ast.AST], list[Any]]:
    """Imports, functions and classes of a file."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found: dict[type[ast.AST], list[Any]] = {kind: [] for kind in kinds}
    for node in ast.walk(parsed(path)):
        if type(node) in found:
            found[type(node)].append(node)
    return found


@cache
def imports(path: Path) -> list[str]:
    plain = [alias.name for node in nodes(path)[ast.Import] for alias in node.names]
    return plain + [node.module for node in nodes(path)[ast.ImportFrom] if node.module and node.level == 0]


@cache
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


NETWORK = {"urllib.request", "http.client", "http.server", "requests", "httpx", "httpx2", "huggingface_hub", "ssl"}
SPEAK = {"rstar_ray/telemetry/traces.py", "rstar_ray/chat/hub.py", "rstar_ray/tools/mcp_server.py"}
"""Of the words, the maths and the loop: those who speak to a network, as CONTRIBUTING.md names them."""


def test_who_speaks_to_a_network_is_named():
    speak = {str(path.relative_to(REPOSITORY)) for path in modules("rstar_ray") if NETWORK & set(imports(path))}
    assert speak == SPEAK
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    assert all(f"`{name}`" in text for name in SPEAK)


def dependencies() -> dict[str, set[str]]:
    """Every module of the project, and those of the project that it imports, inside functions too."""
    files = [path for room in ROOMS for path in modules(room)]
    names = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path for path in files
    }
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        found[name] = {alias.name for node in nodes(path)[ast.Import] for alias in node.names} & names.keys()
        for node in nodes(path)[ast.ImportFrom]:
            assert node.level == 0, f"{path} imports by a relative name, which this test does not follow"
            if node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names} & names.keys()
                found[name] |= members or ({node.module} & names.keys())
    return found


def test_no_files_import_each_other_in_a_circle():
    remaining = dependencies()
    while leaves := {name for name, needs in remaining.items() if not needs & remaining.keys()}:
        remaining = {name: needs for name, needs in remaining.items() if name not in leaves}
    assert not remaining, f"in a circle, or above one: {sorted(remaining)}"


def test_what_runs_in_the_jail_imports_nothing_but_the_jail_and_the_standard_library():
    for path in modules("sandbox/jail"):
        for name in imports(path):
            top = name.partition(".")[0]
            ours = name == "sandbox.jail" or name.startswith("sandbox.jail.")
            assert ours or top in sys.stdlib_module_names | WARM, f"{path.name} imports {name}"


def test_the_product_imports_neither_benchmarks_nor_examples_nor_tests():
    for path in [path for room in ROOMS for path in modules(room)]:
        assert not {"benchmarks", "examples", "tests"} & {name.partition(".")[0] for name in imports(path)}, path


def test_recipes_do_not_start_each_other():
    for path in modules("recipes"):
        for node in nodes(path)[ast.ImportFrom]:
            if (node.module or "").startswith("recipes"):
                assert "main" not in {alias.name for alias in node.names}, path


LOOKERS = {"NodeReader", "StandIn"}
"""Actors that live for a look at a node, and belong to no run."""


def test_every_actor_of_a_run_says_who_it_is():
    files = modules("actors")
    classes = {node.name: node for path in files for node in nodes(path)[ast.ClassDef]}
    calls = [node for path in files for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    remote = {
        call.args[0].id
        for call in calls
        if call.args and isinstance(call.args[0], ast.Name) and ast.unparse(call.func).startswith("ray.remote")
    } & classes.keys()
    decorated = {
        name for name, node in classes.items() if any("ray.remote" in ast.unparse(d) for d in node.decorator_list)
    }

    def says(name: str) -> bool:
        methods = {one.name for one in classes[name].body if isinstance(one, ast.FunctionDef)}
        return "__repr__" in methods or any(says(base.id) for base in classes[name].bases if isinstance(base, ast.Name))

    actors = (remote | decorated) - LOOKERS
    assert actors >= {"GenerationActor", "LearnerActor", "BalancerActor", "SandboxExecutor", "ToolHostActor"}
    assert [name for name in actors if not says(name)] == []


@pytest.mark.skipif(not (REPOSITORY / ".git").exists() or not shutil.which("git"), reason="not a checkout of git")
def test_only_files_are_committed():
    """A link would lead to a path of one machine, and a checkout puts it in place of what is there."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert [line for line in listed if not line.startswith("100")] == []
