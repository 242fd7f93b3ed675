"""How an answer is put together: lists, sets, tuples, intervals, unions, matrices, plus-minus; the rest are leaves."""

import re
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["leaf", "unordered", "ordered", "union"]
MAX_PARTS = 24
"""Longer lists are not taken apart: unordered ones are compared each with each."""
MAX_DEPTH = 4

_AND = re.compile(r",?\s*\\text\s*\{\s*(?:and|or)\s*,?\s*\}|(?:^|,?\s+)(?:and|or)\s+|;")
_MATRIX = re.compile(r"\\begin\s*\{([pbvVB]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_NAMED = re.compile(
    r"(?:(?:\\[a-zA-Z]+|[a-zA-Z]|[A-Z]{2,4}|\|\s*[a-zA-Z]+\s*\||\\#\s*[a-zA-Z]"
    r"|\\(?:vec|hat|bar|overline|overrightarrow|angle|triangle|text)\s*\{?\s*[A-Za-z ]{1,20}\}?)"
    r"(?:_\s*(?:\{\w+\}|\w+))?'*(?:\s*\([^()=]*\))?|\([a-z](?:\s*,\s*[a-z])+\))\s*(?:=|\\approx(?![a-z])|\\in(?![a-z]))\s*"
)
_INDEXED = re.compile(r"(\\?[a-zA-Z]+)_\{?\w+\}?")
_CUP = r"\\cup(?![a-zA-Z])"
_BOUND = r"([^<>=]+?)"
_LESS, _MORE = r"\s*(<|\\le)\s*", r"\s*(>|\\ge)\s*"
_UNKNOWN = r"([a-zA-Z]|\\[a-z]+)"
_BETWEEN = re.compile(_BOUND + _LESS + _UNKNOWN + _LESS + _BOUND)
_BETWEEN_DOWN = re.compile(_BOUND + _MORE + _UNKNOWN + _MORE + _BOUND)
_ONE_SIDED = re.compile(r"([a-zA-Z])\s*(<|>|\\le|\\ge)\s*([^<>=]+)")
_ONE_SIDED_BACK = re.compile(r"([^<>=]+?)\s*(<|>|\\le|\\ge)\s*([a-zA-Z])")
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_SUCH_THAT = re.compile(r"([a-zA-Z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid(?![a-z])|\||:)\s*(.+)")
_REALS = "\\mathbb{R}"


@dataclass(frozen=True, slots=True)
class Node:
    """One answer or a part of it. `brackets` are empty where it has none, and never matter for `unordered`."""

    kind: Kind
    text: str = ""  # of a leaf
    brackets: str = ""
    parts: tuple["Node", ...] = ()
    name: str = ""  # that stood in front, or what an inequality bounds


def structure(text: str, depth: int = 0) -> Node:
    """Take a text (in one spelling) apart; one that cannot be is a leaf."""
    name, text = _named(text.strip())
    if depth >= MAX_DEPTH:
        return Node("leaf", text, name=name)
    for _ in range(MAX_DEPTH):
        inner, brackets = _inside(text)
        if brackets == "()" and len(split_outside(inner, "[,;]")) == 1 and inner.strip():
            inner_name, text = _named(inner.strip())
            name = name or inner_name
    found = _of_sets(text, depth) or _of_pieces(text, depth) or _of_interval(text) or Node("leaf", _bare(text))
    return replace(found, name=name) if name else found


def _of_sets(text: str, depth: int) -> Node | None:
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return Node("unordered")
    if text == _REALS:
        return Node("ordered", brackets="()", parts=(_leaf("-\\infty"), _leaf("\\infty")))
    turned = re.search(r"(?:^|\\cup)\s*\]|\[\s*(?:$|\\cup)", text)  # `]0,1] \cup [2,3[`: no brackets that pair
    pieces = [piece.strip() for piece in re.split(_CUP, text)] if turned else split_outside(text, _CUP)
    if 1 < len(pieces) <= MAX_PARTS:
        return Node("union", parts=tuple(structure(piece, depth + 1) for piece in pieces))
    if matrix := _MATRIX.fullmatch(text):
        rows = [row for row in re.split(r"\\\\", matrix[2]) if row.strip()]
        cells = [[structure(cell, depth + 1) for cell in row.split("&")] for row in rows]
        sides = {"v": "|", "V": "||"}.get(matrix[1][0], "")  # a determinant, a norm
        return Node(
            "ordered", brackets=f"{sides}matrix", parts=tuple(Node("ordered", parts=tuple(row)) for row in cells)
        )
    return None


def _of_pieces(text: str, depth: int) -> Node | None:
    inner, brackets = _inside(text)
    if brackets:
        pieces = split_outside(inner, "," if "," in inner else ";")
        such_that = _SUCH_THAT.fullmatch(inner.strip()) if brackets == "\\{\\}" else None
        if such_that and (interval := _of_interval(such_that[2])) and interval.name == such_that[1]:
            return replace(interval, name="")
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
        lists = node.kind == "unordered" and node.parts and not _inside(piece.strip())[1]
        parts += node.parts if lists else (node,)
    return Node("unordered", parts=tuple(parts))


def _by_name(pieces: list[str], depth: int) -> Node | None:
    """`x = 1, y = 2` in the order of its names; None where they do not all differ."""
    named = {found[0].strip(" ="): piece for piece in pieces if (found := _NAMED.match(piece.strip()))}
    if len(named) < len(pieces):
        return None
    names = sorted(named)
    parts = (replace(structure(named[name], depth + 1), name="") for name in names)
    return Node("ordered", brackets=",".join(names), parts=tuple(parts))


def _listed(text: str) -> list[str]:
    """The members of a list without brackets; a number's thousands are no members."""
    if re.fullmatch(r"(?:[A-Z]{3} )?[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:\s*[^\d,].*)?", text):
        return [text]
    joined = [piece for part in split_outside(text, ",") for piece in _AND.split(part)]
    return [piece for piece in joined if piece.strip()]


def _of_interval(text: str) -> Node | None:
    """An inequality in one unknown as the interval it says."""
    if between := _BETWEEN.fullmatch(text):
        low, left, name, right, high = between.groups()
        return _interval(low, high, closed=(left == "\\le", right == "\\le"), name=name)
    if between := _BETWEEN_DOWN.fullmatch(text):
        high, right, name, left, low = between.groups()
        return _interval(low, high, closed=(left == "\\ge", right == "\\ge"), name=name)
    if one_sided := _ONE_SIDED.fullmatch(text):
        name, sign, bound = one_sided.groups()
    elif one_sided := _ONE_SIDED_BACK.fullmatch(text):
        bound, sign, name = one_sided[1], _TURNED[one_sided[2]], one_sided[3]
    else:
        return None
    if sign in ("<", "\\le"):
        return _interval("-\\infty", bound, closed=(False, sign == "\\le"), name=name)
    return _interval(bound, "\\infty", closed=(sign == "\\ge", False), name=name)


def _interval(low: str, high: str, *, closed: tuple[bool, bool], name: str) -> Node:
    brackets = ("[" if closed[0] else "(") + ("]" if closed[1] else ")")
    return Node("ordered", brackets=brackets, parts=(_leaf(low), _leaf(high)), name=name)


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


def _named(text: str) -> tuple[str, str]:
    """(the one name in front, what follows): `x = 5`, `f(x) = x^2`, `x \\in (0, 1)`. A chain of equations has none."""
    found = _NAMED.match(text)
    rest = text[found.end() :] if found else text
    if found and rest.strip() and not re.search(r"(?<![<>!])=|\\approx", rest):
        return re.sub(r"\s*(?:=|\\approx|\\in)\s*$", "", found[0]), rest.strip()
    return "", re.sub(r"^\\approx\s*", "", text)


def names_agree(ours: str, theirs: str) -> bool:
    """One may be missing, or in words; `y` is a name of `f(x)`, and `\\vec{v}` one of `v`."""
    if not ours or not theirs or "\\text" in ours + theirs:
        return True
    ours, theirs = (re.sub(r"\\(?:vec|angle|overrightarrow)(?![a-z])|[{}\s]", "", name) for name in (ours, theirs))
    value = r"y'*|[a-zA-Z]'*\([^()]*\)"
    of_function = all(re.fullmatch(value, name) for name in (ours, theirs)) and "y" in (ours[0], theirs[0])
    return ours == theirs or (of_function and ours.count("'") == theirs.count("'"))


def named_as(node: Node, other: Node) -> Node:
    """`(p,q) = (3,5)` as `p = 3, q = 5` where the other is written so."""
    names = re.sub(r"[()\s]", "", node.name).split(",")
    if node.brackets != "()" or len(names) != len(node.parts) or ",".join(sorted(names)) != other.brackets:
        return node
    return Node(
        "ordered", brackets=other.brackets, parts=tuple(node.parts[names.index(name)] for name in sorted(names))
    )


def _inside(text: str) -> tuple[str, str]:
    r"""(what stands between, both brackets) where one pair holds the whole text; `\{` and `\}` are a set's."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return text[2:-2], "\\{\\}"
    if re.fullmatch(r"\][^\[\]()]*,[^\[\]()]*[\[\])]|[\[\](][^\[\]()]*,[^\[\]()]*\[", text):  # `]2,5[` is `(2,5)`
        return text[1:-1], ("(" if text[0] == "]" else text[0]) + (")" if text[-1] == "[" else text[-1])
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return text, ""
    depth = 0
    for position, char in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(char, 0)
        if depth == 0 and position < len(text) - 1:
            return text, ""
    return text[1:-1], text[0] + text[-1]


def same_unknown(node: Node) -> bool:
    """Whether all of its names are of one unknown, as those of `x_1 = 1, x_2 = 2` are."""
    letters = {found[1] for name in node.brackets.split(",") if (found := _INDEXED.fullmatch(name))}
    return len(letters) == 1 and node.brackets.count("_") == len(node.parts)


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
