"""An extension of griffe for `make docs`: the comment after a field of a record is its text in the API reference."""

import io
import tokenize
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]


class FieldComments(griffe.Extension):
    """Attributes that have a docstring keep it."""

    def on_attribute_instance(self, *, node: Any, attr: Any, agent: Any, **_: Any) -> None:
        if attr.docstring is None and (text := comment_of(attr.source)):
            attr.docstring = griffe.Docstring(text, lineno=attr.lineno, parent=attr)


def comment_of(source: str) -> str:
    """The comments of a statement, as one sentence; empty without one.

    >>> comment_of("reward: str = '#'  # name of the rule")
    'Name of the rule'
    """
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source.strip()).readline))
    except (tokenize.TokenError, IndentationError):
        return ""
    text = " ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)
    return text[:1].upper() + text[1:]
