r"""One spelling for what mathematics is written in several: `\dfrac12`, `\left(`, `×`, `1{,}000`."""

import re

MAX_CHARS = 2_000
"""A longer answer is none."""

_ONE_SPELLING = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\(?:left|right|[bB]ig+[lrm]?|displaystyle|textstyle|limits)(?![a-zA-Z])\.?", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:mathrm|textbf|textrm|textit|mathbf|mbox|operatorname\*?|mathit|textsf)\s*\{", r"\\text{"),
        (r"(?<=\d)(?:\\[,!; ]|\{,\}|,\\!)\s*(?=\d{3}(?!\d))", ""),  # thousands
        (r"(?<!\\)\\(?:[,;:! ]|qquad|quad)|~", " "),
        (r"\\(?:lbrace)(?![a-zA-Z])", r"\\{"),
        (r"\\(?:rbrace)(?![a-zA-Z])", r"\\}"),
        (r"\^\s*\{?\s*(?:\\circ|°|\\degree)\s*\}?|°|\\degree(?![a-zA-Z])", r" \\text{degrees}"),
        (r"\\%", "%"),
        (r"\\\$", "USD "),
        (r"\\leqs?l?ant?(?![a-zA-Z])|\\leq(?![a-zA-Z])|≤|<=", r"\\le "),
        (r"\\geqs?l?ant?(?![a-zA-Z])|\\geq(?![a-zA-Z])|≥|>=", r"\\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])|∅", r"\\emptyset "),
        (r"\\(?:infin)(?![a-zA-Z])|∞", r"\\infty "),
        (r"[−–]", "-"),
        (r"×", r"\\times "),
        (r"[·⋅]", r"\\cdot "),
        (r"±", r"\\pm "),
        (r"∪", r"\\cup "),
        (r"π", r"\\pi "),
        (r"∈", r"\\in "),
        (r"√\s*(\d+)", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\s+", " "),
    )
]


def one_spelling(text: str) -> str:
    """The same mathematics in one spelling; dollars around it, a final stop and empty space are gone."""
    text = text.strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(left + right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)]
    if re.fullmatch(r"\$\s*[\d.,]+", text):
        text = "USD " + text[1:]
    for pattern, by in _ONE_SPELLING:
        text = pattern.sub(by, text)
    text = text.strip()
    return text[:-1].strip() if text.endswith(".") and not text.endswith("..") else text


def dense(text: str) -> str:
    r"""Without any space but one that ends a command: `\pi r` is not `\pir`."""
    return re.sub(r"(?<=[^a-zA-Z]) | (?=[^a-zA-Z]|$)|^ ", "", text)


def unwrapped(text: str) -> str:
    r"""What `\text{...}` around a whole text holds; the text itself otherwise."""
    found = re.fullmatch(r"\\text\{([^{}]*)\}", text.strip())
    return found[1].strip() if found else text
