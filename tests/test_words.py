"""Docs and code use the field's words: none of those that the glossary of CONTRIBUTING.md avoids."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
AVOIDED = re.compile(
    r"\b(mend(s|ed|ing)?|anew|once more|told|(hears?|heard) of|(get|got|gets|getting) on|by lot|set aside|know again"
    r"|lets? go|of (its|their|our|one's|ones) own|(?<!there )(is|are) (?-i:none)(?! of)|asked otherwise|not well"
    r"|(goes|go|going|gone|went) on|shut door|clairvoyant|crews?|fates?|births?|decorations?|tally|tallies|twins?"
    r"|cages?|caged|flavou?rs?|(?<!there )is no (?!longer|more)\w+)\b".replace(" ", "[ \n]"),
    re.IGNORECASE,
)
PROMPTS = {
    "rstar_ray/chat/instructions.py",
    "rstar_ray/tiny/conversations.py",
    "rstar_ray/evaluation/request_digest.py",
}
"""Texts that a model reads, and keys of a digest: another wording is another experiment."""
OLD_KEYS = re.compile('"(birth|set_aside)"')
"""Keys in files of a running cluster and of earlier versions."""
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
WRAPPED = re.compile(r"[ \t]*\n[ \t]*(?:#[ \t]+)?")
PARTS = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])")


def found(text: str) -> Iterator[tuple[int, str]]:
    """Line numbers and words; a phrase may be wrapped, and may be part of a name in snake or camel case."""
    text = PARTS.sub(" ", WRAPPED.sub("\n", OLD_KEYS.sub("", text)))
    for hit in AVOIDED.finditer(text):
        yield text.count("\n", 0, hit.start()) + 1, hit[0].replace("\n", " ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_avoids_them(page: Path):
    assert not list(found(page.read_text("utf-8")))


def test_a_module_avoids_them_in_names_comments_docstrings_and_messages():
    hits = [
        f"{path.relative_to(REPOSITORY)}:{line}: {words}"
        for path in MODULES
        for line, words in found(path.read_text("utf-8"))
    ]
    assert not hits, "\n".join(hits)


def test_the_sandbox_calls_the_process_that_runs_programs_a_worker():
    pages = [*(REPOSITORY / "sandbox").rglob("*.py"), REPOSITORY / "docs/sandbox.md"]
    assert not [page for page in pages if re.search(r"(?i)\bcells?\b", PARTS.sub(" ", page.read_text("utf-8")))]


def test_phrases_are_found_in_names_and_across_lines():
    assert list(found("nothing got on: mend it, -1 is no share")) == [(1, "got on"), (1, "mend"), (1, "is no share")]
    assert list(found("def mend_rows(): ...\n\nclass LetGo:\n    # it goes\n    # on")) == [
        (1, "mend"),
        (3, "Let Go"),
        (4, "goes on"),
    ]
    assert not list(found("there is none, there\n    is no GPU, it is no longer used, x is None, none is of its kind"))
