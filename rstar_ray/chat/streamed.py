"""A turn as it is written, for somebody who watches: what is thought and what is said; calls are kept back."""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from rstar_ray.chat.profile import Thought


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

    def feed(self, text: str) -> Iterator[tuple[Heard, str]]:
        """What can be shown now that `text` has come."""
        self._kept += text
        while True:
            markers = self._markers()
            found = min(((at, one) for one in markers if (at := self._kept.find(one)) >= 0), default=None)
            if found is None:
                yield from self._shown(len(self._kept) - _partial(self._kept, markers))
                return
            at, marker = found
            yield from self._shown(at)
            self._kept = self._kept[len(marker) :]
            self._pass(marker)

    def end(self) -> Iterator[tuple[Heard, str]]:
        """What was kept back and is no marker after all."""
        yield from self._shown(len(self._kept))

    def _markers(self) -> list[str]:
        if self._until:
            return [self._until]
        if self._inside:
            return [self._thought.closes, *(self._calls if self._thought.holds_calls else ())]
        return [self._thought.opens, *self._calls]

    def _pass(self, marker: str) -> None:
        if self._until:
            self._until = ""
        elif marker in self._calls:
            self._until = self._calls[marker]
        else:
            self._inside = marker == self._thought.opens

    def _shown(self, count: int) -> Iterator[tuple[Heard, str]]:
        text, self._kept = self._kept[:count], self._kept[count:]
        if text and not self._until:
            yield (Heard.THOUGHT if self._inside else Heard.SAID), text


def _partial(text: str, markers: Sequence[str]) -> int:
    """Characters at the end that may be the beginning of a marker."""
    longest = min(len(text), max(map(len, markers)) - 1)
    return next((n for n in range(longest, 0, -1) if any(one.startswith(text[-n:]) for one in markers)), 0)
