"""Docs, help texts and messages use the field's words: none of those that the glossary of CONTRIBUTING.md avoids."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
AVOIDED = re.compile(
    r"\b(mend(s|ed|ing)?|anew|once more|told|hears? of|(get|got|gets|getting) on|by lot|set aside|know again|let go"
    r"|of (its|their|one's) own|(is|are) none|asked otherwise|not well|(goes|go|going|gone|went) on"
    r"|shut_door|clairvoyant|crews?|fates?|births?|decorations?|tally|tallies|twins?|cages?|caged"
    r"|(?<!there )is no (?!longer|more)\w+)\b",
    re.IGNORECASE,
)
PROMPTS = {
    "rstar_ray/chat/instructions.py",
    "rstar_ray/tiny/conversations.py",
    "rstar_ray/evaluation/request_digest.py",
}
"""Texts that a model reads, and keys of a digest: another wording is another experiment."""
PAGES = [
    *(REPOSITORY / "docs").glob("*.md"),
    *(REPOSITORY / "examples").glob("*.md"),
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "BENCHMARKS.md")),
]
MODULES = [
    path
    for room in ("rstar_ray", "sandbox", "scheduler", "actors", "recipes")
    for path in (REPOSITORY / room).rglob("*.py")
    if str(path.relative_to(REPOSITORY)) not in PROMPTS
]


def found(text: str) -> list[str]:
    return [hit[0] for hit in AVOIDED.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_avoids_them(page: Path):
    assert not [f"line {n}: {found(line)}" for n, line in enumerate(page.read_text().splitlines(), 1) if found(line)]


def shown(module: ast.Module) -> Iterator[ast.Constant]:
    """Texts that a person may see: strings in code, and the help texts below the fields of a class.

    Other docstrings are for readers of the code, and a string without a space is a name.
    """
    unseen: set[int] = set()
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        for before, statement in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            is_help = isinstance(node, ast.ClassDef) and isinstance(before, ast.AnnAssign)
            if isinstance(statement, ast.Expr) and not is_help:
                unseen.add(id(statement.value))
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and id(node) not in unseen and " " in str(node.value):
            yield node


def test_help_texts_and_messages_avoid_them():
    hits = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}: {words}"
        for path in MODULES
        for node in shown(ast.parse(path.read_text("utf-8")))
        if (words := found(str(node.value)))
    ]
    assert not hits, "\n".join(hits)


def test_the_check_sees_what_it_is_for():
    assert found("nothing got on: mend it") == ["got on", "mend"] and found("-1 is no share") == ["is no share"]
    assert not found("there is no GPU, and it is no longer used")
    code = 'class C:\n  """is told"""\n  a: int = 0\n  """goes on"""\n  def f(self): raise E(f"once more {1} x")\n'
    assert [node.value for node in shown(ast.parse(code))] == ["goes on", "once more ", " x"]
