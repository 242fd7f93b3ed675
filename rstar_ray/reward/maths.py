r"""Is a mathematical answer equal to the truth? math-verify decides, in the sandbox; this module guards it.

Numbers, alone or with a unit, are compared here, exactly. Everything else is math-verify's decision, except for answers
that leave the work to it (`\sqrt{3}+\sqrt{3}`, huge powers), prose, and notation that it reads as something else
(`f'` as f, `\gcd(a,b)` as a product): those must be equal as text. Texts are bounded, and every pattern takes time in
proportion to their length.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction

Pair = tuple[str, str]
Compare = Callable[[Sequence[Pair]], Awaitable[Sequence[bool]]]
"""(answer, truth) pairs to whether each is equal, by math-verify."""

MAX_CHARS = 2_000
"""Longer answers are wrong."""

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge "}
    | {"≠": r"\ne ", "±": r"\pm ", "°": r"^\circ ", "√": r"\sqrt ", "∪": r"\cup ", "²": "^2", "³": "^3", "~": " "}
)
_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|boldsymbol|mathbf|bf|fbox|boxed|underline|!)(?![a-zA-Z])", ""),
        (r"\\color\{[a-z]*\}|(?<!\\)\$|\\[()]|\\\\?$", ""),
        (r"(?<!\\)\\(?:[,;: ]|q?quad(?![a-zA-Z]))", " "),
        (r"\\[cdt]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:langle|lbrack)(?![a-zA-Z])", "("),
        (r"\\(?:rangle|rbrack)(?![a-zA-Z])", ")"),
        (r"\\mathbb ?([A-Z])", r"\\mathbb{\1}"),
        (r"\\mathcal ?\{(\w)\}", r"\1"),
        (r"\\(?:mathrm|mbox|textbf|operatorname) ?\{", r"\\text{"),
        (r"\\text ?\{ ?(e|and|or|[-+]?\d[\d.,]*) ?\}", r" \1 "),
        (r"(?<![a-zA-Z]),? ?(?:and|or)(?![a-zA-Z])|\\lor(?![a-zA-Z])", ","),
        (r"<=|\\leq(?![a-zA-Z])", r"\\le "),
        (r">=|\\geq(?![a-zA-Z])", r"\\ge "),
        (r"\\neq(?![a-zA-Z])", r"\\ne "),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\*\*", "^"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"\+ ?/? ?-", r"\\pm "),
        (r"([_^]) ?\{(\w)\}", r"\1\2"),
        (r"\{([,.])\}", r"\1"),
        (r"^\{([^{},]*)\}$", r"\1"),
        (r"\\frac ?(\d|\\pi) ?(\d|\{)", r"\\frac{\1}\2"),
        (r"(\\frac ?\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)?\}) ?(\d)", r"\1{\2}"),
        (r"\s+", " "),
    )
]
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_FRACTION = re.compile(rf"\\frac ?\{{ ?\(?([+-]? ?{_WHOLE})\)? ?\}} ?\{{ ?([+-]? ?{_WHOLE}) ?\}}")
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?(?:(?:(?P<mixed>\d+) )?\(?(?P<over>[+-]? ?{_WHOLE})\)? ?/ ?(?P<under>[+-]? ?{_WHOLE})"
    rf"|(?P<decimal>{_WHOLE}?\.\d+|{_WHOLE}\.?)(?:\\overline ?\{{(?P<repeated>\d+)\}})?"
    r"(?: ?(?:(?:\\times|\\cdot) ?10 ?\^|[eE]) ?\{? ?(?P<power>[+-]?\d{1,3}) ?\}?)?)"
)
_DECIMAL_COMMA = re.compile(r"-?\d+,(?!\d{3}$)\d+")
_UNIT = re.compile(
    r"(?: ?(?P<mark>\\?%|\^ ?\{? ?\\circ ?\}? ?(?:\\text ?\{ ?[CF] ?\}|[CF])?|_ ?\{? ?\d+ ?\}?|[€£]|\\text ?\{[^{}]*\})"
    r"|(?: | ?(?<![a-zA-Z\\])(?=\(?[a-zA-Z]{2}))\(?[a-zA-Z]{1,20}(?: [a-z]{1,20}){0,2}\)?)(?: ?\^ ?\{?[23]\}?)?$"
)
_MONEY = re.compile(r"(?:\\\$|USD|[€£]) ?|\\text ?\{ ?[€£] ?\} ?")
_NO_UNIT = re.compile(
    r"hundred|thousand|illion|dozen|hal[fv]|third|quarter|tenth|factorial|squared|cubed|choose|mod|plus|minus|times|over"
    r"|not|least|most|otherwise|infinity|(?<![a-z])(?:or|and|pi|e|i)(?![a-z])"
)
_UNITS = {
    **{"%": "percent", "pct": "percent", "percentage": "percent", "circ": "degree", "deg": "degree", "texto": "degree"},
    **{"$": "dollar", "usd": "dollar", "€": "euro", "£": "pound", "cm": "centimeter", "mm": "millimeter", "m": "meter"},
    **{"km": "kilometer", "kg": "kilogram", "g": "gram", "ft": "foot", "feet": "foot", "in": "inch", "h": "hour"},
}
_NAME = re.compile(r"(?=.*[a-zA-Z])(?:[^=<>+*/^!,;\d-]|_ ?\{?\d+\}?|\(\d+\))+", re.DOTALL)
_NAME_ENDS = re.compile(r"(?<!:)=|\\approx(?![a-zA-Z])")
_NAMES = re.compile(r"(?<![\w_{\\])[a-zA-Z](?:_ ?\{?\w+\}?)?'?(?:\([^()]*\))? ?=(?!=)")
_READ = frozenset(
    re.findall(
        r"\S+",
        r"\frac \sqrt \cdot \times \div \pi \infty \text \cup \cap \pm \mp \in \le \ge \ne \mid \mathbb \begin \end "
        r"\emptyset \sin \cos \tan \cot \sec \csc \log \ln \exp \arcsin \arccos \arctan \binom \setminus \alpha \beta "
        r"\gamma \delta \theta \lambda \mu \omega \phi \sigma \vec \angle \approx \overline \circ \# \sum \prod \int "
        r"\lim \to",
    )
)
"""Commands that math-verify reads as they are meant."""
_SERIES = re.compile(r"\\(?:sum|prod|int|lim)(?![a-zA-Z])")
_COMMAND = re.compile(r"\\[a-zA-Z#]+")
_MISREAD = re.compile(
    r"'|\^ ?\{? ?(?:T(?![a-z])|\\top|\*)|\\frac ?\{ ?(?:d|\\partial)|[A-Z]\)? ?\^ ?\{ ?- ?1|[+-] ?[+-]|vmatrix|\|\|"
    r"|(?:lcm|gcd|mod|max|min|det)(?![a-z])"
)
_HUGE = re.compile(r"\^ ?\{? ?\(?[+-]?\d{4,}|\^ ?\{[^{}a-zA-Z]*\^")
_WORDS = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{4,}(?![a-zA-Z}])|\\text ?\{")
_RELATION = re.compile(r"[=<>]|\\(?:in|le|ge|ne|mid|approx)(?![a-zA-Z])")
_WORK = [
    re.compile(pattern)
    for pattern in (
        r"[\d)}\]] ?\^(?! ?\{? ?\(?(?:1 ?/ ?\d|\\frac ?\{ ?1)| ?\{? ?\\circ)",
        r"\d ?(?:\\cdot|\\times|\*|\\div) ?\(?\d|\) ?\(\d",
        r"(?<=[\w})\]!]) ?[+-]",
        r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp|binom|sum|prod|int|lim)(?![a-z])|!",
    )
]
"""Powers and products of numbers, sums, and functions: a constant may not hold more of them than the truth does."""


async def same_mathematics(answer: str, truth: str, compare: Compare) -> bool:
    """Whether `answer` equals `truth`; `compare` is called at most once, with one pair."""
    verdict = decide(answer, truth)
    return verdict if isinstance(verdict, bool) else (await compare([verdict]))[0]


def decide(answer: str, truth: str) -> bool | Pair:
    """The verdict where it needs no computer algebra, else the pair that math-verify should compare."""
    if max(len(answer), len(truth)) > MAX_CHARS:
        return False
    (ours, our_unit), (theirs, their_unit) = _split_unit(spelled(answer)), _split_unit(spelled(truth))
    if not ours or not theirs or (our_unit and their_unit and our_unit != their_unit):
        return False
    if _dense(ours) == _dense(theirs):
        return True
    for one, other in ((ours, theirs), (theirs, ours)):
        if _DECIMAL_COMMA.fullmatch(one) and "," not in other and number(one.replace(",", ".")) == number(other):
            return True
    if re.sub(r"\{[^{}]*\}", "", theirs).count("=") > 1 and "," not in theirs:
        theirs = theirs.rpartition("=")[2].strip()  # a chain of equations ends with the value
    (name, ours), (true_name, theirs) = _split_name(ours), _split_name(theirs)
    if name and true_name and name != true_name and {name, true_name} != {"y", "f"}:
        return False
    if _dense(ours) == _dense(theirs):
        return True
    value, true_value = number(ours), number(theirs)
    if true_value is not None:
        return value is not None and _equal_numbers(value, true_value) and not _undone(ours, value)
    if value is not None and value.denominator != 1:
        return False  # an approximation of what the truth writes exactly
    if not _may_be_compared(ours, theirs):
        return False
    names, true_names = (set(_NAMES.findall(text)) for text in (ours, theirs))
    if names != true_names:
        bases, true_bases = ({name[0] for name in some} for some in (names, true_names))
        if len(bases | true_bases) == 1 or not (names and true_names):
            ours, theirs = (
                _NAMES.sub("", text) if len({name[0] for name in _NAMES.findall(text)}) == 1 else text
                for text in (ours, theirs)
            )
        elif len(bases) == len(true_bases) == 1:
            return False
    return _equation(ours), _equation(theirs)


def number(text: str) -> Fraction | None:
    r"""The number that a text writes out (`1,234`, `-\frac{3}{4}`, `1 1/2`, `0.1\overline{6}`, `2\times 10^5`)."""
    text = re.sub(r"^\\?[({](.*[^\\])\\?[)}]$", r"\1", text) if text.count("(") <= 1 and ")/" not in text else text
    text = _FRACTION.sub(r" \1/\2", text).strip()
    if (found := _NUMBER.fullmatch(text)) is None:
        return None
    parts = {name: re.sub("[, ]", "", part) for name, part in found.groupdict().items() if part}
    if "under" in parts:
        over, under = int(parts["over"]), int(parts["under"])
        if under == 0 or ("mixed" in parts and not 0 < over < under):
            return None
        value = Fraction(over, under) + int(parts.get("mixed", 0))
    else:
        value = Fraction(parts["decimal"]) * Fraction(10) ** int(parts.get("power", 0))
        if repeated := parts.get("repeated"):
            fixed = len(parts["decimal"].partition(".")[2])
            value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10**fixed)
    return -value if parts.get("sign") == "-" else value


def _undone(text: str, value: Fraction) -> bool:
    """A whole number written as a fraction."""
    return value.denominator == 1 and ("/" in text or "\\frac" in text)


def _equal_numbers(value: Fraction, truth: Fraction) -> bool:
    """Exactly equal, or a decimal with at least six places for a fraction that has no finite one, as in math-verify."""
    if value == truth or truth.denominator == 1:
        return value == truth
    return value.denominator >= 10**6 and round(value, 6) == round(truth, 6)


def _may_be_compared(ours: str, theirs: str) -> bool:
    """Whether math-verify's verdict on these two can be trusted."""
    both = f"{ours} {theirs}"
    commands = set(_COMMAND.findall(both))
    if commands - _READ or _MISREAD.search(both) or _HUGE.search(both) or _WORDS.search(both):
        return False
    letters, true_letters = _letters(ours), _letters(theirs)
    related, truth_related = bool(_RELATION.search(ours)), bool(_RELATION.search(theirs))
    if (
        letters != true_letters
        and not (letters <= true_letters and truth_related)
        and not (letters >= true_letters and related)
    ):
        return False
    if letters and true_letters and letters != true_letters:
        return False
    names = {name[0] for name in _NAMES.findall(ours)}
    if len(names) > 1 and not truth_related and "(" not in theirs:
        return False
    if not letters and any(len(work.findall(ours)) > len(work.findall(theirs)) for work in _WORK):
        return False
    if _SERIES.search(both):
        return _SERIES.findall(ours) == _SERIES.findall(theirs)
    if related or truth_related or "\\pm" in both:
        return True
    (members, brackets), (true_members, true_brackets) = _shape(ours), _shape(theirs)
    return brackets in (true_brackets, "any") and (members == true_members or "(" in theirs)


def _shape(text: str) -> tuple[int, str]:
    r"""(members, brackets) of a list: `\{1,2\}` has the shape of `1,2`, and a tuple or interval another."""
    text = text.strip()
    nested = text.count("\\{")
    if text.startswith("{") and text.endswith("}") and "," in text:
        return text.count(","), "any"  # braces without a backslash only group
    if nested == 1 and text.startswith("\\{") and text.endswith("\\}"):
        text, nested = text[2:-2], 0
    depth, commas = 0, 0
    whole = text[:1] in "([" and text[-1:] in ")]"
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        commas += char in ",;" and depth == 0
        whole = whole and (depth > 0 or place == len(text) - 1)
    return commas, f"{nested}{'()' if whole and ',' in text else ''}"


def _letters(text: str) -> Counter[str]:
    """The unknowns, without names in front of an equals sign."""
    text = re.sub(r"\\(?:text|begin|end|mathbb) ?\{[^{}]*\}", "", _NAMES.sub("", text))
    return Counter(dict.fromkeys(re.findall("[a-zA-Z]", _COMMAND.sub("", text)), 1)) - Counter("ei")


def _equation(text: str) -> str:
    """`L = R` as L - R where R has letters alone, which math-verify would take for the answer."""
    left, equals, right = text.partition("=")
    if not equals or "=" in right or "," in text or re.search(r"\d", right):
        return text
    return f"({left.strip()})-({right.strip()})"


def _split_name(text: str) -> tuple[str, str]:
    """(name, value) of `x = 5`, `f(2) = 5`, `AB = 5`, `\\approx 5`; a name of words alone says nothing."""
    end = _NAME_ENDS.search(text)
    name = text[: end.start()] if end else ""
    if end is None or len(name) > 60 or (name and not _NAME.fullmatch(name)):
        return "", text
    value = text[end.end() :].strip()
    if "\\sqrt" in name or name.count("{") != name.count("}") or "=" in re.sub(r"\{[^{}]*\}", "", value):
        return "", text
    name = re.sub(r"\([^()]*\)|\\text ?\{[^{}]*\}|\\[a-z]+|[^a-zA-Z'_\d]", "", name)
    return ("" if re.search("[a-z]{3}", name) else name), value


def spelled(text: str) -> str:
    """The same text with one spelling for what LaTeX and keyboards write in several ways."""
    text = text.translate(_CHARACTERS).strip()
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text.strip(" .,;") if not text.strip().startswith(".") else text.strip(" ,;")


def _dense(text: str) -> str:
    """Without the spaces that do not count, and words without case and frame: `1 1/2` is not `11/2`."""
    if words := re.fullmatch(r"(?:\\text ?\{)?\(?([a-zA-Z ]{1,60})\)?\}?", text):
        return words[1].strip().lower() if len(words[1].strip()) > 1 else words[1].strip()
    return re.sub(r"(?<=[^a-zA-Z\d]) |(?<=\d) (?!\d)|(?<!\d) (?=[^a-zA-Z]|$)", "", text)


def _split_unit(text: str) -> tuple[str, str]:
    """(value, unit under one name); words that change the value are no unit."""
    money = _MONEY.match(text)
    begin = money.end() if money else 0
    unit = _UNIT.search(text, begin)
    if unit:
        value = text[begin : unit.start()].strip()
        known = number(value) is not None or (unit["mark"] and re.search(r"(?:[\d)}\]]|\\pi)$", value))
        word = unit[0].strip().lower()
        joined = not unit["mark"] and not unit[0].startswith(" ") and _UNITS.get(word, word) == word and word != "mph"
        if not value or not known or joined or _NO_UNIT.search(unit[0].lower()):
            unit = None
    words = re.sub(r"\\text|[^a-z0-9%$€£]", "", (unit[0] if unit else money[0] if money else "").lower())
    words = re.sub(r"^square(.*)", r"\g<1>2", words)
    word, power = (words[:-1], words[-1]) if re.fullmatch(r"[a-z]+[23]", words) else (words, "")
    word = _UNITS.get(word, _UNITS.get(word.rstrip("s"), word.rstrip("s")))
    return text[begin : unit.start() if unit else None].strip(), word + power
