"""A turn as it is written, for somebody who watches: what is thought and what is said; calls are kept back."""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from rstar_ray.chat.chat_profile import Thought
from rstar_ray.chat.scan import Scan


class Heard(StrEnum):
    """What a piece of text is."""

    THOUGHT = "thought"
    SAID = "said"


class Streamed:
    """Cuts growing text at the markers of thoughts and calls, wherever the pieces it comes in end."""

    def __init__(self, thought: Thought, *, inside: bool, call_markers: Sequence[tuple[str, str]] = ()) -> None:
        """`inside`: the prompt has opened a thought. `call_markers`: (opening, closing) of what is kept back."""
        self._thought = thought
        self._calls = dict(call_markers)
        self._inside = inside
        self._until = ""  # what closes the call that is being written
        self._kept = ""  # of the text so far: perhaps the beginning of a marker
        self.call_texts: list[str] = []  # of each call so far, markers included; the last one may be unfinished

    def feed(self, text: str) -> Iterator[tuple[Heard, str]]:
        """What can be shown now that `text` has come."""
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

    def end(self) -> Iterator[tuple[Heard, str]]:
        """What was kept back and is no marker after all."""
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

    def _shown(self, text: str) -> Iterator[tuple[Heard, str]]:
        if self._until:
            self.call_texts[-1] += text
        elif text:
            yield (Heard.THOUGHT if self._inside else Heard.SAID), text


def _partial(text: str, position: int, markers: Sequence[str]) -> str:
    """The end of the text from `position` on that may be the beginning of a marker."""
    longest = min(len(text) - position, max(map(len, markers)) - 1)
    ends = (text[len(text) - count :] for count in range(longest, 0, -1))
    return next((end for end in ends if any(one.startswith(end) for one in markers)), "")
