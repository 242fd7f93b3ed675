r"""One spelling for what mathematics is written in several: `\dfrac12`, `\left(`, `×`, `1{,}000`."""

import re

MAX_CHARS = 2_000
"""A longer answer is none."""

_DEGREE = r"(?:\\circ(?![a-zA-Z])|°|\\degree(?![a-zA-Z])|\\text\s*\{\s*o\s*\})"
_ONE_SPELLING = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\(?:left|right|[bB]ig+[lrm]?|displaystyle|textstyle|limits)(?![a-zA-Z])\.?", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\mathrm\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\\(?:mathrm|textbf|text)\s*\{\s*([+-]?\d[\d.,]*)\s*\}", r"\1"),
        (r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:boldsymbol|bm|bf|fbox|boxed|underline)(?![a-zA-Z])", ""),
        (r"\\mathbf\s*\{([^{}]*\d[^{}]*)\}", r"\1"),
        (r"\\(?:mathrm|textbf|textrm|textit|mathbf|mbox|operatorname\*?|mathit|textsf)\s*\{", r"\\text{"),
        (r"(?<=\d)(?:\\[,!; ]|\{,\}|,\\!)\s*(?=\d{3}(?!\d))", ""),  # thousands
        (r"(?<!\\)\\(?:[,;:! ]|qquad|quad)|~", " "),
        (r"\\(?:lbrace)(?![a-zA-Z])", r"\\{"),
        (r"\\(?:rbrace)(?![a-zA-Z])", r"\\}"),
        (rf"\^\s*\{{\s*{_DEGREE}\s*\}}|\^\s*{_DEGREE}|°|\\degree(?![a-zA-Z])", r" \\text{degrees}"),
        (r"\\text\{degrees\}\s*(?:\\text\s*\{\s*([CF])\s*\}|([CF])(?![a-zA-Z]))", r"\\text{degrees \1\2}"),
        (r"\\%", "%"),
        (r"\\\$", "USD "),
        (r"(?:\\text\s*\{)?\s*€\s*\}?\s*(?=\d|$)", "EUR "),
        (r"(?:\\text\s*\{)?\s*£\s*\}?\s*(?=\d|$)", "GBP "),
        (r"\\leqs?l?ant?(?![a-zA-Z])|\\leq(?![a-zA-Z])|≤|<=", r"\\le "),
        (r"\\geqs?l?ant?(?![a-zA-Z])|\\geq(?![a-zA-Z])|≥|>=", r"\\ge "),
        (r"\\neq(?![a-zA-Z])|≠", r"\\ne "),
        (r"\\pmod\s*(\d+|[a-zA-Z](?![a-zA-Z]))", r"\\pmod{\1}"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])|∅", r"\\emptyset "),
        (r"\\(?:infin)(?![a-zA-Z])|∞", r"\\infty "),
        (r"[−–]", "-"),
        (r"×", r"\\times "),
        (r"[·⋅]", r"\\cdot "),
        (r"±|\+/?-", r"\\pm "),
        (r"∪", r"\\cup "),
        (r"\\(?:lor|vee)(?![a-zA-Z])|∨", r" \\text{ or } "),
        (r"\\(?:langle|lparen)(?![a-zA-Z])|⟨", "("),
        (r"\\(?:rangle|rparen)(?![a-zA-Z])|⟩", ")"),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"ℝ|\\R(?:eals)?(?![a-zA-Z])", r"\\mathbb{R}"),
        (r"≈|\\(?:approx|simeq)(?![a-zA-Z])", r"\\approx "),
        (r"(?<=\d)\{\.\}(?=\d)", "."),
        (r"π|(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"\*\*\s*([+-]?\d+|[a-zA-Z])", r"^{\1}"),
        (r"\\exp\s*(?:\{([^{}^]*)\}|\(([^()^]*)\))", r"e^{\1\2}"),
        (r"\\(sin|cos|tan)\s*\^\s*\{\s*-\s*1\s*\}", r"\\arc\1 "),
        (r"\\mathcal\s*\{?\s*O(?![a-zA-Z])\s*\}?", "O"),
        (r"∈", r"\\in "),
        (r"√\s*(\d+)", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"\s+", " "),
        (r"(^|[=+\-(,]) ?\{ ?([+-]? ?\d[\d.,]*) ?\}", r"\1\2"),
    )
]


_SPACED_THOUSANDS = re.compile(r"(?<![\d.,^_{])\d{1,3}(?: \d{3})+(?![\d/])(?! */)")
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")


def one_spelling(text: str) -> str:
    """The same mathematics in one spelling; dollars around it, a final stop and empty space are gone."""
    text = text.strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)]
    if re.fullmatch(r"\$\s*[\d.,]+", text):
        text = "USD " + text[1:]
    text = _SPACED_THOUSANDS.sub(lambda number: number[0].replace(" ", ""), text)
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+", lambda raised: f"^{{{raised[0].translate(_RAISED)}}}", text)
    for pattern, by in _ONE_SPELLING:
        text = pattern.sub(by, text)
    text = re.sub(r"(?:[\s,;]|(?<!\\)\\(?:\\)?)+$", "", _braced_fractions(text.strip()))
    text = _unbraced(text)
    return text[:-1].strip() if text.endswith(".") and not text.endswith("..") else text


def _braced_fractions(text: str) -> str:
    r"""`\frac12`, `\frac\pi4` and `\frac{\sqrt{3}}2` with both of their parts in braces."""
    head, found, rest = text.partition("\\frac")
    if not found or rest[:1].isalpha():
        return text
    over, rest = _argument(rest)
    under, rest = _argument(rest)
    if not over or not under:
        return text
    return f"{head}\\frac{{{_braced_fractions(over)}}}{{{_braced_fractions(under)}}}{_braced_fractions(rest)}"


def _argument(text: str) -> tuple[str, str]:
    """(what a command takes next, what follows): a group in braces, a command with its own group, or one character."""
    text = text.lstrip()
    begin = found.end() if (found := re.match(r"\\[a-zA-Z]+\s*", text)) else 0
    end = _group_end(text, begin)
    if end is not None:
        return (text[:end] if begin else text[1 : end - 1].strip()), text[end:]
    return (text[:begin].strip(), text[begin:]) if begin else (text[:1].strip("{}"), text[1:])


def _group_end(text: str, begin: int) -> int | None:
    """Where the group in braces that begins there has ended; None where none begins, or ends."""
    depth = 0
    for position in range(begin, len(text) if text[begin : begin + 1] == "{" else 0):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    return None


def _unbraced(text: str) -> str:
    """Without braces around all of it."""
    while _group_end(text, 0) == len(text) > 2:
        text = text[1:-1].strip()
    return text


def dense(text: str) -> str:
    r"""Without any space but one that ends a command or a number: `\pi r` is not `\pir`, `1 1/2` not `11/2`."""
    return re.sub(r"(?<=[^a-zA-Z\d]) |(?<=\d) (?!\d)|(?<!\d) (?=[^a-zA-Z]|$)|^ ", "", text)


def unwrapped(text: str) -> str:
    r"""What `\text{...}` around a whole text holds; the text itself otherwise."""
    found = re.fullmatch(r"\\text\{([^{}]*)\}", text.strip())
    return found[1].strip() if found else text
