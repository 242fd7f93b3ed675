"""How an answer is put together: lists, sets, tuples, intervals, unions, matrices, plus-minus; the rest are leaves."""

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["leaf", "unordered", "ordered", "union"]
MAX_PARTS = 24
"""Longer lists are not taken apart: unordered ones are compared each with each."""
MAX_DEPTH = 4

_AND = re.compile(r",?\s*\\text\s*\{\s*(?:and|or)\s*,?\s*\}|,?\s+(?:and|or)\s+|;")
_MATRIX = re.compile(r"\\begin\s*\{([pbvVB]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_NAMED = re.compile(
    r"(?:\\?[a-zA-Z](?:_\{?\w+\}?)?|[a-zA-Z]\s*\([^()=]*\)|\([a-z](?:\s*,\s*[a-z])+\))\s*(?:=|\\in(?![a-z]))\s*"
)
_BETWEEN = re.compile(r"([^<>=]+?)(<|\\le)\s*([a-zA-Z]|\\[a-z]+)\s*(<|\\le)\s*([^<>=]+)")
_ONE_SIDED = re.compile(r"([a-zA-Z])\s*(<|>|\\le|\\ge)\s*([^<>=]+)")


@dataclass(frozen=True, slots=True)
class Node:
    """One answer or a part of it. `brackets` are empty where it has none, and never matter for `unordered`."""

    kind: Kind
    text: str = ""  # of a leaf
    brackets: str = ""
    parts: tuple["Node", ...] = ()


def structure(text: str, depth: int = 0) -> Node:
    """Take a text (in one spelling) apart; one that cannot be is a leaf."""
    text = _without_name(text.strip())
    if depth >= MAX_DEPTH:
        return Node("leaf", text)
    return _of_sets(text, depth) or _of_pieces(text, depth) or _of_interval(text) or Node("leaf", _bare(text))


def _of_sets(text: str, depth: int) -> Node | None:
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return Node("unordered")
    pieces = split_outside(text, r"\\cup(?![a-zA-Z])")
    if 1 < len(pieces) <= MAX_PARTS:
        return Node("union", parts=tuple(structure(piece, depth + 1) for piece in pieces))
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        cells = [[structure(cell, depth + 1) for cell in row.split("&")] for row in rows]
        return Node("ordered", brackets="matrix", parts=tuple(Node("ordered", parts=tuple(row)) for row in cells))
    return None


def _of_pieces(text: str, depth: int) -> Node | None:
    inner, brackets = _inside(text)
    if brackets:
        pieces = split_outside(inner, ",")
        if brackets == "\\{\\}" and len(pieces) <= MAX_PARTS and not re.search(r"\\mid(?![a-z])|[|:]", inner):
            return _unordered(pieces, depth)
        if 1 < len(pieces) <= MAX_PARTS:
            return Node("ordered", brackets=brackets, parts=tuple(structure(piece, depth + 1) for piece in pieces))
        return None
    pieces = _listed(text)
    if 1 < len(pieces) <= MAX_PARTS:
        return _by_name(pieces, depth) or _unordered(pieces, depth)
    if re.search(r"\\(?:pm|mp)(?![a-z])", text):
        signs = [("+", "-"), ("-", "+")]
        both = [re.sub(r"\\mp(?![a-z])", down, re.sub(r"\\pm(?![a-z])", up, text)) for up, down in signs]
        return Node("unordered", parts=tuple(Node("leaf", _bare(one)) for one in both))
    return None


def _unordered(pieces: list[str], depth: int) -> Node:
    """Lists and sets; what a member lists itself (plus-minus) is listed here."""
    parts: list[Node] = []
    for piece in pieces:
        node = structure(piece, depth + 1)
        parts += node.parts if node.kind == "unordered" and not _inside(piece.strip())[1] else (node,)
    return Node("unordered", parts=tuple(parts))


def _by_name(pieces: list[str], depth: int) -> Node | None:
    """`x = 1, y = 2` in the order of its names; None where they do not all differ."""
    named = {found[0].strip(" ="): piece for piece in pieces if (found := _NAMED.match(piece.strip()))}
    if len(named) < len(pieces):
        return None
    names = sorted(named)
    return Node("ordered", brackets=",".join(names), parts=tuple(structure(named[name], depth + 1) for name in names))


def _listed(text: str) -> list[str]:
    """The members of a list without brackets; a number's thousands are no members."""
    if re.fullmatch(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:\s*[^\d,].*)?", text):
        return [text]
    joined = [piece for part in split_outside(text, ",") for piece in _AND.split(part)]
    return [piece for piece in joined if piece.strip()]


def _of_interval(text: str) -> Node | None:
    """An inequality in one unknown as the interval it says."""
    if between := _BETWEEN.fullmatch(text):
        low, left, _, right, high = between.groups()
        opening, closing = "(" if left == "<" else "[", ")" if right == "<" else "]"
        return Node("ordered", brackets=opening + closing, parts=(_leaf(low), _leaf(high)))
    if one_sided := _ONE_SIDED.fullmatch(text):
        _, sign, bound = one_sided.groups()
        if sign in ("<", "\\le"):
            return Node(
                "ordered", brackets="(" + (")" if sign == "<" else "]"), parts=(_leaf("-\\infty"), _leaf(bound))
            )
        return Node("ordered", brackets=("(" if sign == ">" else "[") + ")", parts=(_leaf(bound), _leaf("\\infty")))
    return None


def _leaf(text: str) -> Node:
    return Node("leaf", _bare(text))


def _bare(text: str) -> str:
    """Without the round brackets around a whole leaf, and without a plus before infinity."""
    text = text.strip()
    while True:
        inner, brackets = _inside(text)
        if brackets != "()":
            return re.sub(r"^\+\s*(?=\\infty)", "", text)
        text = inner.strip()


def _without_name(text: str) -> str:
    """Without the one name in front: `x = 5`, `f(x) = x^2`, `x \\in (0, 1)`. A chain of equations keeps it."""
    found = _NAMED.match(text)
    rest = text[found.end() :] if found else text
    return rest.strip() if found and rest.strip() and not re.search(r"(?<![<>!])=", rest) else text


def _inside(text: str) -> tuple[str, str]:
    r"""(what stands between, both brackets) where one pair holds the whole text; `\{` and `\}` are a set's."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return text[2:-2], "\\{\\}"
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return text, ""
    depth = 0
    for position, char in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(char, 0)
        if depth == 0 and position < len(text) - 1:
            return text, ""
    return text[1:-1], text[0] + text[-1]


def split_outside(text: str, separator: str) -> list[str]:
    """Split at a pattern that stands outside of all brackets."""
    pieces, depth, start = list[str](), 0, 0
    pattern = re.compile(separator)
    position = 0
    while position < len(text):
        char = text[position]
        depth += 1 if char in "([{" else -1 if char in ")]}" else 0
        if depth == 0 and (found := pattern.match(text, position)):
            pieces.append(text[start:position].strip())
            start = position = found.end()
            continue
        position += 1
    return [*pieces, text[start:].strip()]
