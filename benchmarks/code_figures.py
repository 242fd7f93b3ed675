"""Figures of the code's size and structure: `python -m benchmarks.code_figures [REVISION ...]`, one column each.

Revisions are read with `git archive`; the default is the working tree. Lines are physical lines of Python files, and
statements are AST statement nodes, so that statements per line show whether a smaller file is only denser. The files
and records on the way of a rollout and of a published weight are those that CONTRIBUTING.md names.
"""

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PRODUCT = ("rstar_ray", "actors", "sandbox", "scheduler", "recipes")
DATA = (".json", ".jsonl", ".txt", ".csv", ".html", ".md", ".yaml", ".svg")
Files = Mapping[str, str]
"""Text by path."""


def working_tree() -> Files:
    """Files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = [path for path in listed.stdout.splitlines() if (REPOSITORY / path).is_file()]
    return {path: (REPOSITORY / path).read_bytes().decode(errors="replace") for path in paths}


def revision(name: str) -> Files:
    """Files of a commit."""
    archive = subprocess.run(["git", "archive", name], cwd=REPOSITORY, check=True, capture_output=True).stdout
    files: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is not None:
                files[member.name] = content.read().decode(errors="replace")
    return files


def figures(files: Files) -> dict[str, str]:
    """Figure by name."""
    product = {path: text for path, text in files.items() if path.endswith(".py") and path.split("/")[0] in PRODUCT}
    trees = {path: ast.parse(text) for path, text in product.items()}
    statements = sum(isinstance(node, ast.stmt) for tree in trees.values() for node in ast.walk(tree))
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    protocols = [one for one in classes if any(ast.unparse(base).startswith("Protocol") for base in one.bases)]
    dataclasses = [one for one in classes if any("dataclass" in ast.unparse(each) for each in one.decorator_list)]
    loose = [path for path in product if re.fullmatch(r"actors/(?!__)\w+\.py", path)]
    tests = {path: text for path, text in files.items() if path.startswith("tests/")}
    names = [name for path in product if not (name := path.rpartition("/")[2]).startswith("__")]
    guide = files.get("CONTRIBUTING.md", "")
    lines = _lines(product)
    return {
        "product: lines of Python": f"{lines:,}",
        "product: files": f"{len(product):,}",
        "product: statements per line": f"{statements / lines:.3f}",
        "benchmarks/: lines of Python": f"{_lines(_python(files, 'benchmarks/')):,}",
        "examples/: lines of Python": f"{_lines(_python(files, 'examples/')):,}",
        "tests: lines of Python": f"{_lines(_python(files, 'tests/')):,}",
        "tests: lines of data": f"{_lines({p: t for p, t in tests.items() if p.endswith(DATA)}):,}",
        "classes / dataclasses": f"{len(classes)} / {len(dataclasses)}",
        "Protocols": str(len(protocols)),
        "loose files in actors/": str(len(loose)),
        "names of files / of classes that stand twice": " / ".join(map(_twice, (names, [one.name for one in classes]))),
        "files that a rollout passes": _named(guide, "rollout"),
        "files that a published weight passes": _named(guide, "published weight"),
        "records that a rollout is copied into": _records(guide),
    }


def _python(files: Files, folder: str) -> Files:
    return {path: text for path, text in files.items() if path.startswith(folder) and path.endswith(".py")}


def _twice(names: Sequence[str]) -> str:
    return str(sum(count > 1 for count in Counter(names).values()))


def _lines(files: Files) -> int:
    return sum(text.count("\n") for text in files.values())


def _section(guide: str, noun: str) -> str:
    return guide.partition(f"## The way of a {noun}\n")[2].partition("\n## ")[0]


def _named(guide: str, noun: str) -> str:
    return str(len(set(re.findall(r"`([\w/]+\.py)`", _section(guide, noun))))) if _section(guide, noun) else "-"


def _records(guide: str) -> str:
    line = next((one for one in _section(guide, "rollout").splitlines() if one.startswith("Records:")), "")
    return str(len(re.findall(r"`(\w+)`", line))) if line else "-"


def main(revisions: list[str]) -> None:
    columns = {name: figures(revision(name)) for name in revisions} or {"now": figures(working_tree())}
    print("| |" + "".join(f" {name} |" for name in columns))
    print("|---|" + "---|" * len(columns))
    for row in next(iter(columns.values())):
        print(f"| {row} |" + "".join(f" {column[row]} |" for column in columns.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
