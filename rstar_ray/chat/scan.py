"""Left-to-right search in text that a model wrote, in time proportional to its length."""

import re

SPACES = re.compile(r"\s*+")


class Scan:
    """Finds markers in one text, for callers whose positions only grow.

    `str.find` in a loop is quadratic where a marker is missing: every call searches to the end of the text. A scan
    remembers the last hit of each marker, so each character is searched once per marker.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._hits: dict[str, int] = {}
        self._pairs: dict[tuple[str, str], tuple[int, int]] = {}

    def find(self, marker: str, position: int) -> int:
        """The first `marker` at or after `position`, or -1."""
        hit = self._hits.get(marker)
        if hit is None or 0 <= hit < position:
            hit = self._hits[marker] = self.text.find(marker, position)
        return hit

    def find_pair(self, first: str, second: str, position: int) -> int:
        """The first `first` at or after `position` with only whitespace between it and `second`: where `second`
        begins, or -1."""
        hit, follows = self._pairs.get((first, second), (0, 0))
        if follows == 0 or 0 <= hit < position:
            hit, follows = self._pairs[first, second] = self._pair(first, second, position)
        return follows

    def _pair(self, first: str, second: str, position: int) -> tuple[int, int]:
        while (hit := self.text.find(first, position)) >= 0:
            position = hit + len(first)
            follows = past(SPACES, self.text, position)
            if self.text.startswith(second, follows):
                return hit, follows
        return -1, -1


def past(pattern: re.Pattern[str], text: str, position: int) -> int:
    """The end of the match of a pattern that always matches."""
    found = pattern.match(text, position)
    assert found is not None
    return found.end()
