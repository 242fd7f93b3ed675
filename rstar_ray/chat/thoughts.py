"""What a model only thinks, apart from what it says: calls and answers count where they are said."""

from rstar_ray.chat.chat_profile import Thought
from rstar_ray.chat.scan import Scan

ANSWER = "<answer>"


def spoken(text: str, thought: Thought, *, inside: bool) -> str:
    """`text` without its thoughts; with `inside` it begins in one that the prompt has opened.

    A thought that is never closed extends to the end; one of rStar2's kind extends to the answer, since the released
    code of arXiv:2508.20722 looks for the answer in the whole text. A thought that is closed without having been opened
    began before.
    """
    parts: list[str] = []
    opens, closes = thought.opens, thought.closes
    scan, position = Scan(text), 0
    first_close, first_open = scan.find(closes, 0), scan.find(opens, 0)
    if inside or (first_close >= 0 and not 0 <= first_open < first_close):
        if first_close < 0:
            return _after_unclosed(text, thought)
        position = first_close + len(closes)
    while (start := scan.find(opens, position)) >= 0:
        parts.append(text[position:start])
        end = scan.find(closes, start)
        if end < 0:
            return "".join([*parts, _after_unclosed(text[start:], thought)])
        position = end + len(closes)
    return "".join([*parts, text[position:]])


def _after_unclosed(text: str, thought: Thought) -> str:
    start = text.find(ANSWER) if thought.holds_calls else -1
    return text[start:] if start >= 0 else ""


def where_calls_stand(text: str, thought: Thought, *, inside: bool) -> str:
    """The part of `text` whose calls are made."""
    return text if thought.holds_calls else spoken(text, thought, inside=inside)
