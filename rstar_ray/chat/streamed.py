"""A turn as it is streamed to a user: reasoning and content; calls are held back."""

from collections.abc import Iterator, Sequence
from enum import StrEnum

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
    """The part of `text` whose calls count."""
    return text if thought.holds_calls else spoken(text, thought, inside=inside)


class PieceKind(StrEnum):
    """Kind of a piece of text."""

    THOUGHT = "thought"
    SAID = "said"


class Streamed:
    """Splits growing text at the markers of thoughts and calls, wherever the pieces end."""

    def __init__(self, thought: Thought, *, inside: bool, call_markers: Sequence[tuple[str, str]] = ()) -> None:
        """`inside`: the prompt has opened a thought. `call_markers`: (opening, closing) markers of calls, which
        are held back; if the closing marker is empty, only the opening one is held back.
        """
        self._thought = thought
        self._calls = dict(call_markers)
        self._inside = inside
        self._until = ""  # closing marker of the unfinished call
        self._kept = ""  # end of the text so far: may be the beginning of a marker
        self.call_texts: list[str] = []  # text of each call so far, with markers; the last may be unfinished

    def feed(self, text: str) -> Iterator[tuple[PieceKind, str]]:
        """Add `text`; returns the pieces that can be shown now."""
        scan, position = Scan(self._kept + text), 0
        self._kept = ""
        while True:
            markers = self._markers()
            found = min(((at, one) for one in markers if (at := scan.find(one, position)) >= 0), default=None)
            if found is None:
                self._kept = _partial(scan.text, position, markers)
                yield from self._shown(scan.text[position : len(scan.text) - len(self._kept)])
                return
            at, marker = found
            yield from self._shown(scan.text[position:at])
            position = at + len(marker)
            self._pass(marker)

    def end(self) -> Iterator[tuple[PieceKind, str]]:
        """The text that was held back and is not a marker."""
        text, self._kept = self._kept, ""
        yield from self._shown(text)

    def _markers(self) -> list[str]:
        if self._until:
            return [self._until]
        if self._inside:
            return [self._thought.closes, *(self._calls if self._thought.holds_calls else ())]
        return [self._thought.opens, *self._calls]

    def _pass(self, marker: str) -> None:
        if self._until:
            self._until = ""
            self.call_texts[-1] += marker
        elif marker in self._calls:
            self._until = self._calls[marker]
            self.call_texts.append(marker)
        else:
            self._inside = marker == self._thought.opens

    def _shown(self, text: str) -> Iterator[tuple[PieceKind, str]]:
        if self._until:
            self.call_texts[-1] += text
        elif text:
            yield (PieceKind.THOUGHT if self._inside else PieceKind.SAID), text


def _partial(text: str, position: int, markers: Sequence[str]) -> str:
    """The end of the text from `position` on that may be the beginning of a marker."""
    longest = min(len(text) - position, max(map(len, markers)) - 1)
    ends = (text[len(text) - count :] for count in range(longest, 0, -1))
    return next((end for end in ends if any(one.startswith(end) for one in markers)), "")
