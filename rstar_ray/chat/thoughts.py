"""What a model only thinks, apart from what it says: calls and answers count where they are said."""

from rstar_ray.chat.profile import Thought


def spoken(text: str, thought: Thought, *, inside: bool) -> str:
    """`text` without its thoughts; with `inside` it begins in one that the prompt has opened.

    A thought that is never closed goes on to the end. One that is closed without having been opened began before.
    """
    parts: list[str] = []
    opens, closes = thought.opens, thought.closes
    first_close, first_open = text.find(closes), text.find(opens)
    if inside or (first_close >= 0 and not 0 <= first_open < first_close):
        text = text[first_close + len(closes) :] if first_close >= 0 else ""
    while (start := text.find(opens)) >= 0:
        parts.append(text[:start])
        end = text.find(closes, start)
        text = text[end + len(closes) :] if end >= 0 else ""
    return "".join([*parts, text])


def where_calls_stand(text: str, thought: Thought, *, inside: bool) -> str:
    """The part of `text` whose calls are made."""
    return text if thought.holds_calls else spoken(text, thought, inside=inside)
