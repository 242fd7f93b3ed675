r"""Numbers that are written out, and units. `2+3`, `2^{10}` or `\binom{5}{2}` is none here but a sum to be done."""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_DECIMAL = rf"(?:{_WHOLE}\.\d*|\.\d+)"
_SIGN = r"(?P<sign>[+-]?)\s*"
_FORMS = [
    re.compile(_SIGN + form)
    for form in (
        rf"(?P<whole>{_WHOLE})",
        rf"(?P<decimal>{_DECIMAL})",
        r"(?P<head>\d*)\.(?P<fixed>\d*)(?:\\overline|\\dot|\\bar)\{(?P<repeated>\d+)\}",
        rf"\\frac\s*\{{\s*(?P<over>[+-]?\s*{_WHOLE})\s*\}}\s*\{{\s*(?P<under>[+-]?\s*{_WHOLE})\s*\}}",
        rf"(?P<over>{_WHOLE})\s*/\s*(?P<under>{_WHOLE})",
        rf"\(\s*(?P<over>[+-]?{_WHOLE})\s*\)\s*/\s*(?P<under>{_WHOLE})",
        rf"(?P<with>{_WHOLE})\s*\\frac\s*\{{\s*(?P<over>{_WHOLE})\s*\}}\s*\{{\s*(?P<under>{_WHOLE})\s*\}}",
        rf"(?P<with>{_WHOLE})\s+(?P<over>{_WHOLE})\s*/\s*(?P<under>{_WHOLE})",
        rf"(?P<scaled>{_WHOLE}|{_DECIMAL})\s*(?:(?:\\times|\\cdot|\*)\s*10\s*\^\s*|[eE])\{{?\s*(?P<power>[+-]?\d{{1,3}})\s*\}}?",
    )
]

_UNITS = {
    "%": "percent",
    "percent": "percent",
    "degrees": "degree",
    "degree": "degree",
    "usd": "dollar",
    "dollars": "dollar",
    "dollar": "dollar",
    "cents": "cent",
    "eur": "euro",
    "euro": "euro",
    "euros": "euro",
    "gbp": "pound",
    "pound": "pound",
    "pounds": "pound",
    "cm": "centimeter",
    "centimeters": "centimeter",
    "mm": "millimeter",
    "millimeters": "millimeter",
    "m": "meter",
    "meters": "meter",
    "metres": "meter",
    "km": "kilometer",
    "kilometers": "kilometer",
    "in": "inch",
    "inches": "inch",
    "ft": "foot",
    "feet": "foot",
    "miles": "mile",
    "kg": "kilogram",
    "kilograms": "kilogram",
    "g": "gram",
    "grams": "gram",
    "ml": "milliliter",
    "liters": "liter",
    "l": "liter",
    "s": "second",
    "sec": "second",
    "seconds": "second",
    "min": "minute",
    "minutes": "minute",
    "h": "hour",
    "hours": "hour",
    "days": "day",
    "mph": "mile/hour",
    "units": "unit",
    "rad": "radian",
    "radian": "radian",
    "radians": "radian",
    "deg": "degree",
}
_NO_UNITS = {
    *("hundred", "thousand", "million", "billion", "trillion", "dozen", "percentage", "infinity", "pi"),
    *(
        "factorial",
        "squared",
        "cubed",
        "choose",
        "mod",
        "plus",
        "minus",
        "times",
        "over",
        "and",
        "or",
        "not",
        "otherwise",
    ),
    *("half", "halves", "third", "thirds", "quarter", "quarters", "tenth", "tenths", "fifths", "hundredths"),
}
"""Words that change the number they stand behind."""
_BARE = sorted((re.escape(unit) for unit in _UNITS if len(unit) > 1 or unit == "%"), key=len, reverse=True)
"""Units that are understood without `\\text{}`; a single letter is a variable."""
_UNIT_BEHIND = re.compile(
    rf"(?P<value>.*?[\d}})\]!]|.*?\\pi|.*?\.)\s*"
    rf"(?:\\text\s*\{{\s*(?P<text>[^{{}}]*)\}}|(?<![a-zA-Z\\])(?P<bare>(?:square |cubic )?(?:{'|'.join(_BARE)}))"
    r"|(?<= )\(?(?P<word>[a-z]{3,20})\)?)"
    r"\s*(?:\^\s*\{?\s*(?P<power>[23])\s*\}?)?",
    re.IGNORECASE | re.DOTALL,
)
_BASE_BEHIND = re.compile(r"(?P<value>\d+)\s*_\s*(?:\{\s*)?(?P<base>\d{1,2})(?:\s*\})?")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it was written out."""

    value: Fraction
    is_fraction: bool  # with a fraction bar and no whole part


def written_number(text: str) -> Number | None:
    """The rational number that a text (in one spelling) writes out; None for anything else."""
    text = text.strip()
    if len(text) > MAX_DIGITS or not text.isascii():
        return None
    found = next((match for form in _FORMS if (match := form.fullmatch(text))), None)
    if found is None:
        return None
    parts = {name: part.replace(",", "").replace(" ", "") for name, part in found.groupdict().items() if part}
    value = _value(parts)
    if value is None:
        return None
    return Number(-value if parts.get("sign") == "-" else value, "under" in parts and "with" not in parts)


def _value(parts: dict[str, str]) -> Fraction | None:
    if "whole" in parts or "decimal" in parts:
        return Fraction(parts.get("whole") or parts["decimal"])
    if "scaled" in parts:
        return Fraction(parts["scaled"]) * Fraction(10) ** int(parts["power"])
    if "repeated" in parts:
        fixed, repeated = parts.get("fixed", ""), parts["repeated"]
        nines = 10 ** len(fixed) * (10 ** len(repeated) - 1)
        return Fraction(int((parts.get("head") or "0") + fixed or 0), 10 ** len(fixed)) + Fraction(int(repeated), nines)
    if int(parts["under"]) == 0:
        return None
    part = Fraction(int(parts["over"]), int(parts["under"]))
    if "with" in parts and part >= 1:
        return None  # a sum to be done, or a product
    return int(parts.get("with", 0)) + part


def split_unit(text: str) -> tuple[str, str]:
    """(what stands before it, the unit under one name); the unit is empty where there is none."""
    text = text.strip()
    if text[:4] in ("USD ", "EUR ", "GBP "):
        return text[4:].strip(), _UNITS[text[:3].lower()]
    if based := _BASE_BEHIND.fullmatch(text):
        return based["value"], f"base {based['base']}"
    found = _UNIT_BEHIND.fullmatch(text) if len(text) <= MAX_DIGITS else None
    if found is None:
        return text, ""
    words = next(part for part in found.group("text", "bare", "word") if part is not None).strip().lower().strip(".()")
    if _NO_UNITS & set(words.split()):
        return text, ""
    power = found["power"] or ""
    for word, of in (("square ", "2"), ("cubic ", "3")):
        if words.startswith(word):
            words, power = words.removeprefix(word), of
    unit = _UNITS.get(words, words)
    return found["value"].strip(), unit + (f"^{power}" if power else "")
