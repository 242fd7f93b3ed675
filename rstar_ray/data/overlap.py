"""Exact and near duplicates of problems, and problems that share words with an evaluation set.

Legend: W words of all texts end to end, D texts, H hash functions.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

NGRAM_WORDS = 8
"""Words in a row that must not be shared with an evaluation set (arXiv:2508.20722 section 4.2)."""
SHINGLE_WORDS = 3
NEAR = 0.7
"""Two texts with equal numbers and answers are one problem from this Jaccard similarity of their shingles on."""
BANDS, BAND_HASHES = 16, 3
"""MinHash: two texts at `NEAR` meet in at least one band with probability 1 - (1 - NEAR^3)^16 = 0.999."""
TEXTS_AT_ONCE = 20_000  # bounds the memory
_UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # Chinese and Japanese, written without spaces
_TOKEN = re.compile(rf"[{_UNSPACED}]|\\?[^\W\d_{_UNSPACED}]+|\d+(?:\.\d+)?|[^\s\w]")
_DELIMITER = re.compile(r"\\[()\[\],:;! ]|(?<=[^\W\d]):(?=\s|$)")  # of formulas, and colons after a word
_CHARACTER = re.compile(rf"[{_UNSPACED}]")
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_LAYOUT = frozenset(("$", "\\", "{", "}", ".", ",", "~", ";", "\\left", "\\right", "\\displaystyle", "\\text"))
_MIX = np.uint64(0x9E3779B97F4A7C15)


def tokens(text: str) -> list[str]:
    """Words, numbers and signs, without the layout of formulas."""
    return [token for token in _TOKEN.findall(_DELIMITER.sub(" ", text.lower())) if token not in _LAYOUT]


def words(text: str) -> list[str]:
    """Words and numbers only, for comparing n-grams: each is followed by an empty string. A character of Chinese or
    Japanese is not, so that two of them are as long as a word.
    """
    found = _WORD.findall(text.lower())
    return [half for word in found for half in ((word,) if _CHARACTER.match(word) else (word, ""))]


def numbers_of(tokens_of_text: Sequence[str]) -> tuple[str, ...]:
    """The numbers of a text, sorted: problems with different numbers are different problems, however similar
    the words.
    """
    return tuple(sorted(token for token in tokens_of_text if token[0].isdigit()))


@dataclass(frozen=True, slots=True)
class _Flat:
    """All texts end to end as word numbers: [W], and where each text begins: [D + 1]."""

    word_W: NDArray[np.uint64]
    start: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[Sequence[str]], vocabulary: defaultdict[str, int]) -> "_Flat":
        lengths = np.fromiter((len(text) for text in texts), np.int64, len(texts))
        numbered = map(vocabulary.__getitem__, chain.from_iterable(texts))
        word_W = np.fromiter(numbered, np.uint64, int(lengths.sum()))
        return cls(word_W, np.concatenate([[0], np.cumsum(lengths)]))

    def ngrams(self, size: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Hashes of every `size` consecutive words, and the index of their text; none crosses the end of a text."""
        count = len(self.word_W) - size + 1
        if count <= 0:
            return np.empty(0, np.uint64), np.empty(0, np.int64)
        hashed = np.zeros(count, np.uint64)
        for offset in range(size):
            hashed = _mixed(hashed * np.uint64(31) + self.word_W[offset : offset + count] + np.uint64(1))
        text = np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))
        inside = text[:count] == text[size - 1 :]
        return hashed[inside], text[:count][inside]


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX
    return values ^ (values >> np.uint64(27))


def shared_with(texts: Sequence[str], references: Mapping[str, Sequence[str]], *, size: int = NGRAM_WORDS) -> list[str]:
    """For each text the name of the first set that shares `size` consecutive words; empty where none does: [D].

    Two characters of Chinese or Japanese count as a word. A reference with fewer words is compared whole, with texts of
    exactly these words.
    """
    size *= 2  # halves
    vocabulary = _numbering()
    known: dict[str, NDArray[np.uint64]] = {}
    short: dict[tuple[str, ...], str] = {}
    for name, problems in references.items():
        split = [words(problem) for problem in problems]
        known[name], _ = _Flat.of(split, vocabulary).ngrams(size)
        for text in split:
            if 0 < len(text) < size:
                short.setdefault(tuple(text), name)
    found = [""] * len(texts)
    for first, part in _parts(texts):
        split = [words(text) for text in part]
        hashed, text_of = _Flat.of(split, vocabulary).ngrams(size)
        for name, hashes in known.items():
            for index in np.unique(text_of[np.isin(hashed, hashes)]).tolist():
                found[first + index] = found[first + index] or name
        for index, text in enumerate(split):
            if len(text) < size:
                found[first + index] = found[first + index] or short.get(tuple(text), "")
    return found


def near_duplicates(texts: Sequence[Sequence[str]], groups: Sequence[object]) -> list[int]:
    """For each text the index of the first earlier text with the same content, else its own index: [D].

    Only texts of one group are compared; the group holds what must be equal, such as numbers and answer. A
    candidate found by MinHash is confirmed by the exact Jaccard similarity of its shingles.
    """
    key_DB = _band_keys(_signatures(texts), groups)
    first_with: dict[int, list[int]] = {}
    same = list(range(len(texts)))
    for index in _meeting(key_DB):  # the others cannot match any text
        keys: list[int] = key_DB[index].tolist()
        seen = sorted({other for key in keys for other in first_with.get(key, ())})
        shingles = _shingles(texts[index])
        found = next((other for other in seen if _jaccard(shingles, _shingles(texts[other])) >= NEAR), None)
        if found is not None:
            same[index] = found
            continue
        for key in keys:
            first_with.setdefault(key, []).append(index)
    return same


def _band_keys(signature_DH: NDArray[np.uint64], groups: Sequence[object]) -> NDArray[np.uint64]:
    """One key per text and band; texts of one group share it where their hashes in that band are equal."""
    numbers: dict[object, int] = {}
    group_D = np.fromiter((numbers.setdefault(group, len(numbers)) for group in groups), np.uint64, len(groups))
    key_DB = _mixed(group_D[:, None] * np.uint64(BANDS) + np.arange(BANDS, dtype=np.uint64))
    for hash_DB in signature_DH.reshape(len(groups), BANDS, BAND_HASHES).transpose(2, 0, 1):
        key_DB = _mixed(key_DB * np.uint64(31) + hash_DB)
    return key_DB


def _meeting(key_DB: NDArray[np.uint64]) -> list[int]:
    """Texts that share a key with another, in order."""
    values, counts = np.unique(key_DB, return_counts=True)
    return np.flatnonzero(np.isin(key_DB, values[counts > 1]).any(axis=1)).tolist()


def _signatures(texts: Sequence[Sequence[str]]) -> NDArray[np.uint64]:
    """MinHash over shingles: [D, H]; a text without a shingle is represented by its words."""
    vocabulary = _numbering()
    seeds_H = _mixed(np.arange(1, BANDS * BAND_HASHES + 1, dtype=np.uint64) * _MIX)
    signature_DH = np.zeros((len(texts), len(seeds_H)), np.uint64)
    for first, part in _parts(texts):
        padded = [text if len(text) >= SHINGLE_WORDS else [*text, *[""] * (SHINGLE_WORDS - len(text))] for text in part]
        hashed, text = _Flat.of(padded, vocabulary).ngrams(SHINGLE_WORDS)
        begin = np.flatnonzero(np.r_[True, text[1:] != text[:-1]])
        for number, seed in enumerate(seeds_H):
            signature_DH[first : first + len(part), number] = np.minimum.reduceat(_mixed(hashed ^ seed), begin)
    return signature_DH


def _shingles(text: Sequence[str]) -> set[tuple[str, ...]]:
    if len(text) < SHINGLE_WORDS:
        return {tuple(text)}
    return {tuple(text[i : i + SHINGLE_WORDS]) for i in range(len(text) - SHINGLE_WORDS + 1)}


def _jaccard(ours: set[tuple[str, ...]], theirs: set[tuple[str, ...]]) -> float:
    return len(ours & theirs) / len(ours | theirs)


def _numbering() -> defaultdict[str, int]:
    """Words by number, in order of first occurrence."""
    return defaultdict(count().__next__)


def _parts(texts: Sequence[T]) -> Iterator[tuple[int, Sequence[T]]]:
    for first in range(0, len(texts), TEXTS_AT_ONCE):
        yield first, texts[first : first + TEXTS_AT_ONCE]
