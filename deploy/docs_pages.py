"""A hook of mkdocs: the pages that lie beside `docs/` are pages of the site, and links between both kinds hold."""

import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "BENCHMARKS.md": "BENCHMARKS.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""By name in the repository, their place in the site."""
_LINK = re.compile(r"(\]\()(?!https?://|#)([^)#\s]+)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add them."""
    from mkdocs.structure.files import File

    for name, place in BESIDE.items():
        files.append(File.generated(config, place, content=(REPOSITORY / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links as they are in the repository become links of the site."""
    return _LINK.sub(lambda found: found[1] + in_site(found[2]), markdown)


def in_site(link: str) -> str:
    """Of a page of the repository, where the site has it.

    >>> in_site("docs/own.md"), in_site("../README.md"), in_site("images/step.png")
    ('own.md', 'index.md', 'images/step.png')
    """
    plain = link.removeprefix("../").removeprefix("docs/")
    return BESIDE.get(plain, plain)
