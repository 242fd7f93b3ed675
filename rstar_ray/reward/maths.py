r"""Is a mathematical answer equal to the truth? math-verify decides, in the sandbox; this module guards it.

Equal texts and numbers are compared here, exactly. math-verify decides the rest, except for answers that leave work to
it (`\sqrt{3}+\sqrt{3}`, huge powers), prose, and notation that it reads as something else (`f'` as f): those must be
equal as text. Texts are bounded, and patterns take time in proportion to their length.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction

Pair = tuple[str, str]
Compare = Callable[[Sequence[Pair]], Awaitable[Sequence[bool]]]  # (answer, truth) pairs: is each equal for math-verify?
MAX_CHARS = 2_000  # longer answers are wrong
_LITERALS = re.findall(
    r"(\S+)→(\S*)",
    r"−→- –→- ×→\times ·→\cdot π→\pi ∞→\infty ≤→\le ≥→\ge ≠→\ne ±→\pm °→^\circ √→\sqrt ∪→\cup ²→^2 ³→^3 ~→ **→^ <=→\le "
    r">=→\ge \leqslant→\le \geqslant→\ge \leq→\le \geq→\ge \neq→\ne \lbrace→\{ \rbrace→\} \langle→( \rangle→) "
    r"\varnothing→\emptyset \lvert→| \rvert→| α→\alpha β→\beta γ→\gamma θ→\theta λ→\lambda φ→\phi",
)
_SPELLINGS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|boldsymbol|(?:math)?bf|fbox|boxed|underline|!)(?![a-zA-Z])\s?", ""),
    (r"\\color\{[a-z]*\}|(?<!\\)\$|\\[()]|(?<!\\)\\[\[\]]|\\\\?$", ""),
    (r"(?<!\\)\\(?:[,;: ]|q?quad(?![a-zA-Z]))|\s+", " "),
    (r"\\[cdt](frac|binom)(?![a-zA-Z])", r"\\\1"),
    (r"\\(?:mathrm|mbox|textbf|operatorname) ?\{", r"\\text{"),
    (r"\\text ?\{ ?(e|and|or|[-+]?\d[\d.,]*) ?\}|\\mathcal ?\{(\w)\}", r" \1\2 "),
    (r"(?<![a-zA-Z]),? {0,3}(?:and|or)(?![a-zA-Z])|\\lor(?![a-zA-Z])", ","),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"\+ ?/? ?-", r"\\pm "),
    (r"([_^]) ?\{ ?(\w) ?\}|\{([,.])\}|^\{([^{},]*)\}$", r"\1\2\3\4"),
    (r"\\mathbb ?([A-Z])", r"\\mathbb{\1}"),
    (r"\\sqrt ?\((\w+)\)|^\{(\\frac\{\w+\}\{\w+\})\}$", lambda of: of[2] or f"\\sqrt{{{of[1]}}}"),
    (r"\\frac ?(\d|\\pi) ?(\d|\{)", r"\\frac{\1}\2"),
    (r"(\\frac ?\{[^{}]*+(?:\{[^{}]*+\}[^{}]*+)?\}) ?(\d)", r"\1{\2}"),
]
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d{1,3}(?:, \d{3}){2,}|\d+)"
_FRACTION = re.compile(rf"\\frac ?\{{ ?\(?([+-]? ?{_WHOLE})\)? ?\}} ?\{{ ?([+-]? ?{_WHOLE}) ?\}}")
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?) ?(?:(?:(?P<mixed>\d+) )?\(?(?P<over>[+-]? ?{_WHOLE})\)? ?/ ?(?P<under>[+-]? ?{_WHOLE})"
    rf"|(?P<decimal>{_WHOLE}?\.\d+|{_WHOLE}\.?)(?:(?<=[.]|\d)\\overline ?\{{(?P<repeated>\d+)\}})?"
    r"(?: ?(?:(?:\\times|\\cdot) ?10 ?\^|[eE]) ?\{? ?(?P<power>[+-]?\d{1,3}) ?\}?)?)"
)
_DECIMAL_COMMA = re.compile(r"-?\d+,(?!\d{3}$)\d{2,}")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_LISTED = re.compile(r"[(\[][^()\[\]]*,|\\\{")
_UNIT = re.compile(
    r"(?<=[\d})\]i])(?: ?(?:\\?%|\^ ?\{? ?\\circ ?\}? ?(?:\\text ?\{ ?[CF] ?\}|[CF])?|_ ?\{? ?\d+ ?\}?|[€£]|\\\$|USD"
    r"|\\text ?\{[^{}\d,]*,? ?\}(?: ?/ ?\\text ?\{[^{}\d,]*\})?"
    r"|(?:[ckm]?m|k?g|ft|in|mph|ml|pct|rad|deg|sec|hrs?)(?<!p[a-z]))| \(?[a-z]{3,20}\)?)"
    r"(?: ?\^ ?\{?[23]\}?)?$"
)
_NO_UNIT = re.compile(
    r"hundred|thousand|illion|dozen|hal[fv]|third|quarter|fifth|sixth|seventh|eighth|ninth|tenth|lakh"
    r"|crore|factorial|squared|cubed|choose|mod|plus|minus|times|over"
    r"|not|least|most|otherwise|infinity|maybe|\b(?:or|and|is|to|if|[^\W\dmglshCF_])\b"
)
_UNITS = {
    "%": "percent", "pct": "percent", "circ": "degree", "deg": "degree", "$": "dollar", "usd": "dollar",
    "€": "euro", "£": "pound",
    "cm": "centimeter", "mm": "millimeter", "m": "meter", "km": "kilometer", "kg": "kilogram", "g": "gram",
    "ft": "foot", "feet": "foot", "in": "inch", "h": "hour", "sec": "second", "rad": "radian",
}  # fmt: skip
_READ = re.compile(  # commands that math-verify reads as they are meant; of others both texts must hold the same
    r"\\(?:frac|sqrt|cdot|times|div|pi|infty|text|cup|cap|pm|mp|in|le|ge|ne|mid|mathbb|begin|end|emptyset|setminus|to"
    r"|approx|sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan|binom)(?![a-zA-Z])"
)
_MISREAD = re.compile(
    r"'|(?<=[A-Z)}]) ?\^ ?\{? ?(?:T(?![a-z])|\\top|\*)|\\frac ?\{ ?(?:d|\\partial)[^{}]*\} ?\{ ?(?:d ?[a-zA-Z\\]|\\par)"
    r"|[A-Z]\)? ?\^ ?\{ ?- ?1 ?\} ?[A-Z(]|[A-Z] ?[A-Z]\)? ?\^ ?\{ ?- ?1|[+-] ?[+-]|vmatrix|\|\|"
    r"|(?:lcm|gcd|mod|max|min|det)(?![a-z])|\^ ?\{? ?\(?[+-]?\d{4,}|\^ ?\{[^{}a-zA-Z]*\^"  # the last two: huge powers
)
_RELATION = re.compile(r"[=<>]|\\(?:in|le|ge|ne|mid|approx|pm|mp|cup|cap|begin|mathbb)(?![a-zA-Z])")
_MEMBER_NAME = re.compile(r"(?:^|(?<=[,;])) ?([a-zA-Z])(_ ?\{?\w+\}?)? ?=")
_BRACED = re.compile(r"\{[^{}]*\}")


async def same_mathematics(answer: str, truth: str, compare: Compare) -> bool:
    """Whether `answer` equals `truth`; `compare` is called at most once, with one pair."""
    verdict = decide(answer, truth)
    return verdict if isinstance(verdict, bool) else (await compare([verdict]))[0]


def decide(answer: str, truth: str) -> bool | Pair:
    """The verdict where it needs no computer algebra, else the pair that math-verify should compare."""
    if max(len(answer), len(truth)) > MAX_CHARS:
        return False
    (ours, our_unit), (theirs, their_unit) = spelled(answer), spelled(truth)
    if not ours or not theirs or "" != our_unit != their_unit != "":
        return False
    for one, other in ((ours, theirs), (theirs, ours)):
        if _DECIMAL_COMMA.fullmatch(one) and "," not in other and number(one.replace(",", ".")) == number(other):
            return True
    if ("," in ours) != ("," in theirs) and not _LISTED.search(ours + theirs):  # neither a list nor an interval
        ours, theirs = (_THOUSANDS.sub(lambda found: found[0].replace(",", ""), text) for text in (ours, theirs))
    if _BRACED.sub("", theirs).count("=") > 1 and "," not in theirs:  # a chain of equations ends with the value
        ours, theirs = (text.rpartition("=")[2].strip() for text in (ours, theirs))
    (name, ours), (true_name, theirs) = _split_name(ours), _split_name(theirs)
    tuples = ("," in name) == ("," in true_name)  # `(x,y) = (1,2)` may describe a point that the truth calls P
    if tuples and name and true_name and name != true_name and {name, true_name} != {"y", "f"}:
        return False
    if _dense(ours) == _dense(theirs):
        return bool(theirs)
    if (wanted := number(theirs)) is not None:  # a number must be written out
        given = number(ours)
        return (given == wanted and _work(ours)[0] <= _work(theirs)[0]) or _stands_for(ours, wanted)
    names, true_names = (set(_MEMBER_NAME.findall(text)) for text in (ours, theirs))
    if len({name[0] for name in names}) > 1 and not true_names and "(" not in theirs:
        return False
    if bool(names) != bool(true_names) and len({name[0] for name in names | true_names}) > 1:
        ours, theirs = _by_name(ours, true_name), _by_name(theirs, name)
        if _dense(ours) == _dense(theirs):
            return True
    if names != true_names and len({name[0] for name in names | true_names}) == 1:
        ours, theirs = _MEMBER_NAME.sub("", ours), _MEMBER_NAME.sub("", theirs)  # `x_1 = 1, x_2 = 2` are values of x
    return (ours, theirs) if _may_be_compared(ours, theirs) else False


def _stands_for(decimal: str, value: Fraction) -> bool:
    """Whether six or more places of a decimal are those of a fraction without a finite decimal expansion."""
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    written = _NUMBER.fullmatch(_bare(decimal))
    if rest == 1 or written is None or "." not in (written["decimal"] or ""):
        return False
    places = len(written["decimal"].partition(".")[2]) - int(written["power"] or 0)
    given = number(decimal)
    if places < 6 or not given:
        return False
    return round(given, 6) == round(value, 6) and abs(given - value) < Fraction(1, 10**places)


def _by_name(text: str, order: str) -> str:
    """`y = 2, x = 1` as the tuple (1,2): coordinates by name, other names in the order of a tuple of names such as
    `n,k`, or as they are written. A bare list of values becomes a tuple.
    """
    found = list(_MEMBER_NAME.finditer(text))
    if not found:
        return text if text.startswith(("(", "[", "{", "\\{")) else f"({text})"
    ends = [later.start() for later in found[1:]] + [len(text)]
    values = {one[0].strip(" ="): text[one.end() : end].strip(" ,;") for one, end in zip(found, ends, strict=True)}
    if len(values) < len(found) or any("," in value for value in values.values()):  # several values of one name
        return text
    names = list(values)
    if set(names) == set(order.split(",")):
        names = order.split(",")
    elif set(names) <= set("xyz"):
        names.sort()
    return f"({','.join(values[name] for name in names)})"


def number(text: str) -> Fraction | None:
    r"""The number that a text writes out (`1,234`, `-\frac{3}{4}`, `1 1/2`, `0.1\overline{6}`, `2\times 10^5`)."""
    if (found := _NUMBER.fullmatch(_bare(text))) is None:
        return None
    parts = {name: re.sub("[, ]", "", part) for name, part in found.groupdict().items() if part}
    over, under, mixed = (int(parts.get(name, default)) for name, default in (("over", 0), ("under", 1), ("mixed", 0)))
    if under == 0 or ("mixed" in parts and not 0 < over < under):
        return None
    value = Fraction(parts.get("decimal", mixed)) * Fraction(10) ** int(parts.get("power", 0)) + Fraction(over, under)
    if repeated := parts.get("repeated"):
        value += Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(parts["decimal"].partition(".")[2]))
    return -value if parts.get("sign") == "-" else value


def _bare(text: str) -> str:
    """Without one pair of brackets, and fractions with a slash."""
    text = _FRACTION.sub(r" \1/\2", text).strip()
    return re.sub(r"^([+-]?) ?(?:\(|\\\{)([^(){},]*[^(){},\\])(?:\)|\\\})$", r"\1\2", text).strip()


def _work(text: str) -> list[int]:
    """Counts: whole numbers as fractions or roots; sums, powers, products of numbers; functions and long decimals."""
    fractions = re.findall(
        r"(?<![\d_])(?<![a-zA-Z]\^)(?<!\\sqrt)(?<!\\sqrt )(\d{1,200}) ?/ ?(\d{1,200})", _FRACTION.sub(r" \1/\2", text)
    )
    roots = sum(round(int(root) ** 0.5) ** 2 == int(root) for root in re.findall(r"\\sqrt ?\{? ?(\d{1,15})", text))
    patterns = (
        r"(?<=[\w})\]!]) ?[+-]",
        r"[\d)}\]] ?\^(?! ?\{? ?\(?(?:1 ?/ ?\d|\\frac ?\{ ?1)| ?\{? ?\\circ)",
        r"\d ?(?:\\cdot|\\times|\*|\\div) ?\(?\d|\) ?\(\d",
        r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp|binom|sum|prod|int|lim)(?![a-z])|!|\.\d{6}",
    )
    undone = sum(int(under) > 0 == int(over) % int(under) for over, under in fractions)
    return [roots + undone, *(len(re.findall(pattern, text)) for pattern in patterns)]


def _may_be_compared(ours: str, theirs: str) -> bool:
    """Whether the answer leaves no work to math-verify, and its verdict on these two can be trusted."""
    commands, true_commands = (sorted(re.findall(r"\\[a-zA-Z]+", _READ.sub("", text))) for text in (ours, theirs))
    bare = (re.sub(r"\\(?:text|begin|end|mathbb) ?\{[^{}]*\}|\\[a-zA-Z]+", "", text) for text in (ours, theirs))
    letters, true_letters = (set(re.findall("[a-df-hj-zA-Z]", _MEMBER_NAME.sub("", text))) for text in bare)
    related, truth_related = bool(_RELATION.search(ours)), bool(_RELATION.search(theirs))
    words = set(re.findall(r"(?<![a-zA-Z\\])[a-zA-Z]{3,}", ours)) - {"pmatrix", "bmatrix"}
    more = [mine > its + 2 * theirs.count("\\pm") for mine, its in zip(_work(ours), _work(theirs), strict=True)]
    sets, true_sets = ours.count("\\{"), theirs.count("\\{")
    if (
        (commands != true_commands or _MISREAD.search(ours) or _MISREAD.search(theirs))
        or (letters != true_letters and not (truth_related and not letters) and not (related and not true_letters))
        or any(word not in theirs and not set(word) <= true_letters for word in words)  # prose
        or (more[0] or (any(more) and not true_letters))  # constants may not leave sums to the checker
        or (sets != true_sets and max(sets, true_sets) > 1)
    ):
        return False
    (members, ordered), (true_members, truly_ordered) = _shape(ours), _shape(theirs)
    alike = ordered == truly_ordered and (
        members == true_members or ours[:1] in ("(", "[")
    )  # a point may be listed twice
    return alike or related or truth_related or ours[:1] == "{"  # a bare brace may be meant for any bracket


def _shape(text: str) -> tuple[int, bool]:
    """(commas outside of brackets, whether one pair of brackets holds a tuple or an interval)."""
    for _ in range(4):
        text = re.sub(r"[(\[][^()\[\]]*[)\]]", lambda group: "#" if "," in group[0] else "@", text)
    return text.count(",") + text.count(";"), text == "#"


def _split_name(text: str) -> tuple[str, str]:
    """(name, value) of `x = 5`, `f(2) = 5`, `AB = 5`, `\\approx 5`; a name of words alone says nothing."""
    end = re.search(r"(?<!:)=|\\approx(?![a-zA-Z])", text)
    name = text[: end.start()].strip() if end else ""
    core = re.sub(r"_ ?(?:\{\w+\}|\w+)|\([^()]*\)", "", name) if name[:1] != "(" else name.replace(",", "")
    bad = re.search(r"[<>+*/^!,;\d-]|\\sqrt", core) or (name and not re.search("[a-zA-Z]", core))
    if end is None or bad or "=" in _BRACED.sub("", text[end.end() :]) or name.count("{") != name.count("}"):
        return "", text
    if re.fullmatch(r"\([^()]*,[^()]*\)", name):
        return name.strip("() ").replace(" ", ""), text[end.end() :].strip()
    name = re.sub(r"\([^()]*\)|\\text ?\{[^{}]*\}|\\[a-z]+|[^a-zA-Z'_\d]", "", name)
    return ("" if re.search("[a-z]{3}", name) else name), text[end.end() :].strip()


def _dense(text: str) -> str:
    """Without the spaces that do not count, and words without case and frame: `1 1/2` is not `11/2`."""
    if words := re.fullmatch(r"(?:\\text ?\{)?\(?([a-zA-Z ]{1,60})\)?\}?", text):
        return words[1].strip().lower() if len(words[1].strip()) > 1 else words[1].strip()
    return re.sub(r"(?<=[^a-zA-Z\d]) |(?<=\d) (?!\d)|(?<!\d) (?=[^a-zA-Z]|$)", "", text)


def spelled(text: str) -> tuple[str, str]:
    """(value in one spelling, unit under one name); words that change the value are not a unit."""
    for written, meant in _LITERALS:
        text = text.replace(written, f"{meant} ")
    for pattern, spelling in _SPELLINGS:
        text = re.sub(pattern, spelling, text)
    text = re.sub(" +", " ", text).rstrip(" .,;").lstrip(" ,;")
    money = re.match(r"(?:\\\$|USD|[€£]) ?|\\text ?\{ ?[€£] ?\} ?", text)
    if (unit := _UNIT.search(text)) and _NO_UNIT.search(unit[0]):
        unit = None
    value = text[money.end() if money else 0 : unit.start() if unit else None].strip()
    words = re.sub("^square(.*)", r"\g<1>2", re.sub(r"\\text|[^a-z0-9%$€£]", "", (unit or money or [""])[0].lower()))
    stem = words.rstrip("23")
    return value, _UNITS.get(stem, _UNITS.get(stem.rstrip("s"), stem.rstrip("s"))) + words[len(stem) :]
