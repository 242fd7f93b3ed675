r"""Is a mathematical answer the truth? The table of docs/rewards.md, as rules over structure, numbers and units.

What the rules leave open (`\frac{1+\sqrt{5}}{2}` against `\frac12 + \frac{\sqrt5}{2}`) goes to computer algebra
in the sandbox; what would leave the arithmetic to it is turned down here.
"""

import re
from collections.abc import Awaitable, Callable, Sequence

from rstar_ray.reward.latex import MAX_CHARS, dense, one_spelling, unwrapped
from rstar_ray.reward.numbers import split_unit, written_number
from rstar_ray.reward.structure import Node, named_as, names_agree, same_unknown, split_outside, structure

Pair = tuple[str, str]
Decide = Callable[[str, str], bool]
Compare = Callable[[Sequence[Pair]], Awaitable[Sequence[bool]]]
"""(answer, truth) pairs to whether each is equal, by a computer algebra system."""

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")
_PLAIN = {"\\frac", "\\sqrt", "\\cdot", "\\times", "\\pi", "\\infty", "\\text", "\\div"}
_ELEMENTARY = {
    *("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc", "\\log", "\\ln", "\\lg", "\\exp"),
    *("\\arcsin", "\\arccos", "\\arctan", "\\sinh", "\\cosh", "\\tanh"),
}
_TO_BE_DONE = {
    *("\\sum", "\\prod", "\\int", "\\iint", "\\oint", "\\lim", "\\limsup", "\\liminf", "\\partial", "\\nabla"),
    *("\\binom", "\\dbinom", "\\tbinom", "\\choose", "\\max", "\\min", "\\sup", "\\inf", "\\gcd", "\\lcm"),
    *("\\bmod", "\\pmod", "\\mod", "\\lfloor", "\\rfloor", "\\lceil", "\\rceil", "\\det", "\\deg", "\\circ"),
    *("\\bigcup", "\\bigcap"),
}
_ROOT = r"\s*\{?\s*\(?(?:1\s*/\s*\d|\\frac\{1\}\{\d\})"
_FUNCTIONS = {
    *("gcd", "lcm", "max", "min", "mod", "det", "sum", "prod", "lim", "int", "diff", "abs", "floor", "ceil", "round"),
    *("log", "ln", "lg", "exp", "sin", "cos", "tan", "cot", "sec", "csc", "sqrt", "binomial", "choose", "factorial"),
}
_POWER_OF_NUMBER = re.compile(rf"[\d)}}\]]\s*(?:\^|\*\*)(?!{_ROOT})")
_PRODUCT_OF_NUMBERS = re.compile(r"\d\s*(?:\\cdot|\\times|\*|\\div)\s*\(?\d|\)\s*\(\s*\d")
_BINARY_SIGN = re.compile(r"(?<=[\w}\])!])\s*[+-]")
_SERIES = re.compile(r"\\(?:sum|prod|int|lim)(?![a-zA-Z])")
_CALL = re.compile(r"\\(?:gcd|lcm|text\{(?:gcd|lcm)\})\s*(?=\()")
_LEIBNIZ = re.compile(
    r"\\frac\{\s*(?:d|\\partial)[^{}]*\}\{\s*(?:d|\\partial)\s*(?:\^\s*\{?\d\}?)?\s*\\?[a-zA-Z][^{}]*\}"
)
_STAND_INS = (
    "\\xi",
    "\\zeta",
    "\\eta",
    "\\kappa",
    "\\chi",
    "\\varphi",
    "\\tau",
    "\\rho",
    "\\nu",
    "\\upsilon",
    "\\iota",
)
_LETTERS = re.compile(r"\\text\s*\{[^{}]*\}|\\[a-zA-Z]+|[a-zA-Z]")
_TWO_SIGNS = re.compile(r"[+-]\s*[+-]")
_TURNED_INTO_ANOTHER = re.compile(r"'|\\prime(?![a-z])|(?<![e\d])\^\s*\{?\s*(?:T|\\top|\\dagger|\\ast|\*)(?![a-zA-Z])")
"""Marks behind a name that computer algebra passes over: a derivative, a transpose."""
_INVERSE = re.compile(r"[A-Z]\)?\s*\^\s*\{\s*-\s*1\s*\}")
_LARGE_POWER = re.compile(r"(?:\^|\*\*)\s*\{?\s*\(?[+-]?\d{4,}|(?:\^|\*\*)[^+\-]{0,40}(?:\^|\*\*)")


async def same_mathematics(answer: str, truth: str, compare: Compare) -> bool:
    """Whether `answer` says what `truth` does, by the rules; `compare` is asked once, where they leave it open."""
    if not answer.strip() or not truth.strip() or len(answer) > MAX_CHARS:
        return False
    given, wanted = structure(one_spelling(answer)), structure(one_spelling(truth))
    open_pairs: dict[Pair, None] = {}

    def note(ours: str, theirs: str) -> bool:
        open_pairs[(ours, theirs)] = None
        return False

    if equal_nodes(given, wanted, note):
        return True
    if not open_pairs:
        return False
    asked = list(open_pairs)
    known = dict(zip(asked, await compare(asked), strict=True))
    return equal_nodes(given, wanted, lambda ours, theirs: known[(ours, theirs)])


def same_by_rules(one: str, other: str) -> bool:
    """Whether two truths say the same, whichever is taken for the answer; no where the rules leave it open."""
    if max(len(one), len(other)) > MAX_CHARS:
        return False
    ours, theirs = structure(one_spelling(one)), structure(one_spelling(other))
    return equal_nodes(ours, theirs, _never) or equal_nodes(theirs, ours, _never)


def _never(_ours: str, _theirs: str) -> bool:
    return False


def equal_nodes(given: Node, wanted: Node, decide: Decide) -> bool:
    """Compare part by part; `decide` judges leaves that the rules leave open. Every open pair is asked for."""
    given, wanted = named_as(given, wanted), named_as(wanted, given)
    if not names_agree(given.name, wanted.name):
        return False
    if given.kind == wanted.kind == "leaf":
        verdict = equal_leaves(given.text, wanted.text)
        return decide(*with_stand_ins(given.text, wanted.text)) if verdict is None else verdict
    if given.kind == wanted.kind == "ordered":
        if given.brackets != wanted.brackets or len(given.parts) != len(wanted.parts):
            return False
        equal = [equal_nodes(ours, theirs, decide) for ours, theirs in zip(given.parts, wanted.parts, strict=True)]
        return all(equal)
    if given.kind == wanted.kind == "union" or "unordered" in (given.kind, wanted.kind):
        return _equal_in_any_order(_members(given), _members(wanted), decide)
    return False


def _members(node: Node) -> tuple[Node, ...]:
    return node.parts if node.kind in ("unordered", "union") or same_unknown(node) else (node,)


def _equal_in_any_order(given: Sequence[Node], wanted: Sequence[Node], decide: Decide) -> bool:
    """Each of the one is one of the other; too many or too few are none."""
    if len(given) != len(wanted):
        return False
    equal = [[_alike(ours, theirs) and equal_nodes(ours, theirs, decide) for theirs in wanted] for ours in given]
    left = set(range(len(wanted)))
    for row in equal:
        match = next((j for j in left if row[j]), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _alike(ours: Node, theirs: Node) -> bool:
    r"""Both are sets or neither: `\{5\}` says 5, but not inside of a set."""
    return (ours.kind == "unordered") == (theirs.kind == "unordered")


def equal_leaves(answer: str, truth: str) -> bool | None:
    """The rules for one number, expression or word; None leaves it to computer algebra."""
    if dense(answer) == dense(truth):
        return bool(truth)
    ours, our_unit = split_unit(answer)
    theirs, their_unit = split_unit(truth)
    if our_unit and their_unit and our_unit != their_unit:
        return False
    if dense(ours) == dense(theirs):
        return bool(theirs)
    wanted, given = written_number(theirs), written_number(ours)
    if wanted is not None:  # a number must be written out
        if given is None or (given.is_fraction and wanted.value.denominator == 1):
            return False
        return given.value == wanted.value
    if re.fullmatch("[A-Za-z]", theirs) and re.fullmatch("[A-Za-z]", ours):
        return False
    if _is_words(theirs) or _is_words(ours):
        return _word(ours) == _word(theirs)
    if given is not None and "." in ours and "." not in theirs:
        return False  # an approximation
    if "\\infty" in ours + theirs:
        return False
    return None if may_be_compared(ours, theirs) else False


def may_be_compared(answer: str, truth: str) -> bool:
    """False for an answer that leaves the work to whoever compares it."""
    if _equations(answer) != _equations(truth) or _equations(answer) > 1:
        return False
    if not set(_COMMAND.findall(answer)) <= _allowed_commands(truth) or _other_words(answer, truth):
        return False
    if _TWO_SIGNS.search(answer) and not _TWO_SIGNS.search(truth):
        return False
    if len(_TURNED_INTO_ANOTHER.findall(answer)) != len(_TURNED_INTO_ANOTHER.findall(truth)):
        return False
    if any(sign in answer and sign not in truth for sign in ("!", "|", "\\\\", "?", "_")):
        return False
    if (_may_be_matrices(answer) or _may_be_matrices(truth)) and answer.replace(" ", "") != truth.replace(" ", ""):
        return False  # computer algebra takes their products in any order
    if _LARGE_POWER.search(answer) and not _LARGE_POWER.search(truth):
        return False
    if (_LARGE_POWER.search(truth) or _SERIES.search(truth)) and _figures(answer) != _figures(truth):
        return False  # computer algebra takes $1-2^{-2^{2002}}$ for 1, and passes over what stands below a sum
    if _SERIES.search(truth) and _letters(answer) != _letters(truth):
        return False
    if sorted(map(dense, _LEIBNIZ.findall(answer))) != sorted(map(dense, _LEIBNIZ.findall(truth))):
        return False  # dx/dy is dy/dx to it
    if has_unknown(truth):
        return True
    if has_unknown(answer):
        return False
    return not any(
        len(pattern.findall(answer)) > len(pattern.findall(truth))
        for pattern in (_POWER_OF_NUMBER, _PRODUCT_OF_NUMBERS, _BINARY_SIGN)
    )


def with_stand_ins(answer: str, truth: str) -> Pair:
    r"""Both with a symbol in place of each `\gcd(...)`, the same one where the arguments are the same.

    Computer algebra takes letters for polynomials, of which any two have the divisor 1 alone. And it reads all letters
    as small ones: of a letter that stands in both cases the large one has a symbol too.
    """
    names: dict[tuple[str, ...], str] = {}
    free = [name for name in _STAND_INS if name not in answer + truth]

    def replaced(text: str) -> str:
        parts, position = list[str](), 0
        while (found := _CALL.search(text, position)) and (end := _closed(text, found.end())):
            arguments = split_outside(text[found.end() + 1 : end - 1], ",")
            key = ("lcm" if "lcm" in found[0] else "gcd", *sorted(_terms_in_order(one) for one in arguments))
            if key not in names and len(names) == len(free):
                break  # more of them than there are symbols
            parts += [text[position : found.start()], names.setdefault(key, free[len(names) % len(free)]), " "]
            position = end
        return "".join([*parts, text[position:]])

    return _cases_apart(replaced(answer), replaced(truth))


def _cases_apart(answer: str, truth: str) -> Pair:
    """Empty texts, which equal nothing, where there are more such letters than symbols."""
    letters = set(_letters(answer + " " + truth))
    both = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    free = [name for name in _STAND_INS if name not in answer + truth]
    if len(both) > len(free):
        return "", ""
    symbols = dict(zip(both, free, strict=False))

    def apart(text: str) -> str:
        """Commands and words keep their letters."""
        return _LETTERS.sub(lambda found: f"{symbols[found[0]]} " if found[0] in symbols else found[0], text)

    return apart(answer), apart(truth)


def _terms_in_order(text: str) -> str:
    """`-1+p` and `p-1` as one."""
    terms, depth = [""], 0
    for char in text if text.startswith(("+", "-")) else f"+{text}":
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(char, 0)
        if char in "+-" and depth == 0:
            terms.append("")
        terms[-1] += char
    return " ".join(sorted(map(dense, terms)))


def _closed(text: str, begin: int) -> int:
    """Behind the bracket that closes the one at `begin`; 0 where none does."""
    depth = 0
    for position in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    return 0


def has_unknown(text: str) -> bool:
    r"""A letter other than `e` and `i`, or a named one such as `\alpha`."""
    named = set(_COMMAND.findall(text)) - _PLAIN - _ELEMENTARY - _TO_BE_DONE
    return bool(named) or bool(re.search(r"[a-df-hj-zA-Z]", _without_commands(text)))


def _allowed_commands(truth: str) -> set[str]:
    theirs = set(_COMMAND.findall(truth))
    if not has_unknown(truth):
        return theirs | _PLAIN
    return theirs | _PLAIN | _ELEMENTARY


def _other_words(answer: str, truth: str) -> set[str]:
    """Of the answer, which are no products of the truth's unknowns either: `ab` is one of `(a+b)^2`, `gcd` is none."""
    theirs = _without_commands(truth)
    words = set(_WORD.findall(_without_commands(answer))) - set(_WORD.findall(theirs))
    return {word for word in words if word.lower() in _FUNCTIONS or not set(word) <= set(theirs)}


def _may_be_matrices(text: str) -> bool:
    """An inverse, and two large letters."""
    return bool(_INVERSE.search(text)) and len({letter for letter in _letters(text) if letter.isupper()}) > 1


def _figures(text: str) -> list[str]:
    return sorted(re.findall(r"\d+", text))


def _letters(text: str) -> list[str]:
    return sorted(re.findall("[a-zA-Z]", _without_commands(text)))


def _equations(text: str) -> int:
    return len(re.findall(r"(?<![<>!])=", text))


def _without_commands(text: str) -> str:
    return _COMMAND.sub(" ", re.sub(r"\\text\s*\{[^{}]*\}", " ", text))


def _is_words(text: str) -> bool:
    """Text and no mathematics: `\\text{Monday}`, `Monday`, `no solution`."""
    if unwrapped(text) != text.strip():
        return True
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z' -]*[A-Za-z]", text)) and bool(re.search(r"[A-Za-z]{3}", text))


def _word(text: str) -> str:
    return re.sub(r"[^\w+-]+", " ", unwrapped(text)).strip().casefold()
