"""Every setting is read by the program, and has its default in one place."""

import ast
from pathlib import Path

import pytest

from rstar_ray.config import RunConfig, leaves

REPOSITORY = Path(__file__).parent.parent
ROOMS = ("rstar_ray", "sandbox", "scheduler", "actors", "recipes")


def test_every_setting_is_read():
    read = _read()
    unread = [
        name for name in leaves(RunConfig()) if not {name.rpartition(".")[2], "--" + name.replace("_", "-")} & read
    ]
    assert unread == []


def _read() -> set[str]:
    """Attributes that the program reads, but for the checks of the settings themselves; and the strings in it."""
    found: set[str] = set()
    for path in (path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py")):
        nodes = [ast.parse(path.read_text("utf-8"))]
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
                continue
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.parent.name != "config":
                found.add(node.value)
            nodes += ast.iter_child_nodes(node)
    return found


OWN_MEANING = {
    "sandbox/http/": "a server and a client that other projects may use",
    "recipes/roc_vs_grpo.py": "an experiment says what differs, as a recipe does",
    "recipes/plan.py": "the stage that is planned for",
    "rstar_ray/run_dir/metrics.py": "the only stage that has such rows",
    "rstar_ray/chat/call_syntax.py": "the name of a way of writing calls",
    "rstar_ray/tools/host.py": "of a tool's own start",
    "scheduler/expected_kv/estimate.py": "a share of what is remembered",
    "scheduler/traces/": "of the steps that schedulers are tried on",
}
"""Files in which something of a setting's name means something else."""


@pytest.mark.long
def test_no_setting_has_a_second_default_below_the_settings():
    """A field or parameter of a setting's name takes its value from `RunConfig`, or is told it."""
    names = {name.rpartition(".")[2] for name in leaves(RunConfig())}
    found: list[str] = []
    for room in ROOMS:
        for path in sorted((REPOSITORY / room).rglob("*.py")):
            where = str(path.relative_to(REPOSITORY))
            if "bench" not in path.parts and "config" not in path.parts and not where.startswith(tuple(OWN_MEANING)):
                found += [f"{where}: {name}" for name in _stated(ast.parse(path.read_text("utf-8"))) if name in names]
    assert found == []


def _stated(tree: ast.Module) -> list[str]:
    """Fields and parameters with a number or a word of their own; nothing, no and 0 say that there is none."""
    pairs: list[tuple[str, ast.expr | None]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            given = [*node.args.posonlyargs, *node.args.args]
            pairs += [(one.arg, value) for one, value in zip(reversed(given), reversed(node.args.defaults))]  # noqa: B905
            pairs += [(one.arg, value) for one, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        elif isinstance(node, ast.ClassDef):
            fields_ = [
                one for one in node.body if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one)
            ]
            pairs += [(one.target.id, one.value) for one in fields_ if isinstance(one.target, ast.Name)]
    return [name for name, value in pairs if isinstance(value, ast.Constant) and value.value]
