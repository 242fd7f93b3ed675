"""One of several letters: `B`, `(B)`, `\\text{B}`, `B) 12`."""

import re

_LETTER = re.compile(r"\(?\s*([A-Za-z])\s*(?:$|[).:,]|\s-)")


def chosen_letter(answer: str) -> str | None:
    """The letter that an answer names, as a capital; None where it names none."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", answer.strip().strip("$*")).strip()
    found = _LETTER.match(text)
    return found[1].upper() if found else None
