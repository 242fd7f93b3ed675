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
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)#\s]+)([^)]*)\)")
"""Text, target and anchor."""


def on_files(files: Any, *, config: Any) -> Any:
    """Add them."""
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    for name, place in BESIDE.items():
        files.append(File.generated(config, place, content=(REPOSITORY / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any = None, **_: Any) -> str:
    """Links as they are in the repository become links of the site; of a file that is no page the text remains."""
    up = "../" * (page.file.src_uri.count("/") if page else 0)

    def linked(found: re.Match[str]) -> str:
        text, link, anchor = found.groups()
        plain = link.removeprefix(up)
        return f"[{text}]({up}{in_site(plain)}{anchor})" if is_page(plain) else text

    return _LINK.sub(linked, markdown)


def _plain(link: str) -> str:
    return link.removeprefix("../").removeprefix("docs/")


def is_page(link: str) -> bool:
    """False for a file of the repository that the site does not have, such as code.

    >>> is_page("docs/own.md"), is_page("../README.md"), is_page("rstar_ray/train_loop.py")
    (True, True, False)
    """
    plain = _plain(link)
    return plain in BESIDE or (REPOSITORY / "docs" / plain).exists() or not (REPOSITORY / plain).exists()


def in_site(link: str) -> str:
    """Of a page of the repository, where the site has it.

    >>> in_site("docs/own.md"), in_site("../README.md"), in_site("images/step.png")
    ('own.md', 'index.md', 'images/step.png')
    """
    plain = _plain(link)
    return BESIDE.get(plain, plain)
