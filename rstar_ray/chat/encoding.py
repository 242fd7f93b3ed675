"""Tokenizes a text part by part, with the same tokens as the whole text.

SentencePiece tokenizers put a space before every input. Prompts, results and conversations are tokenized part
by part (a part may be foreign, or have a loss), and only the first part begins a text.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

SENTINELS = ("\n", "\u2402", ".", "x")
"""Precedes a part that does not begin the text, while it is tokenized."""


class Encoder:
    """A tokenizer that adds no tokens to the text, such as a beginning of sequence."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        one = self._encode(["x"])[0]
        self.puts_space_first: bool = tokenizer.decode([*one, *one]) != "xx"
        added = tokenizer.added_tokens_decoder.values()
        self._strip_after = tuple(str(token) for token in added if token.rstrip)
        self._specials = tuple(str(token) for token in added if token.special)
        self._sentinel, self._sentinel_ids = self._find_sentinel() if self.puts_space_first else ("", [])
        self._after_specials = self.puts_space_first and self._puts_space_after_specials()

    def encode(self, text: str, *, after: str = "", plain: bool = False) -> list[int]:
        """The tokens of `text` after `after`; with `plain` no part of it becomes a control token."""
        return self.encode_all([text], after=[after], plain=plain)[0]

    def encode_all(self, texts: Sequence[str], *, after: Sequence[str], plain: bool = False) -> list[list[int]]:
        """The tokens of each of `texts`, as they follow the corresponding text of `after`."""
        if self._strip_after:  # tokens that include the whitespace after them
            texts = [
                text.lstrip() if before.rstrip().endswith(self._strip_after) else text
                for text, before in zip(texts, after, strict=True)
            ]
        if not self.puts_space_first or not texts:
            return self._encode(texts, plain=plain)
        held = [bool(text) and self._continues(before) for text, before in zip(texts, after, strict=True)]
        marked = [self._sentinel + text if hold else text for text, hold in zip(texts, held, strict=True)]
        encoded = self._encode(marked, plain=plain)
        begin = len(self._sentinel_ids)
        lost = [hold and ids[:begin] != self._sentinel_ids for ids, hold in zip(encoded, held, strict=True)]
        return [
            self._encode([text], plain=plain)[0] if merged else ids[begin:] if hold else ids
            for text, ids, hold, merged in zip(texts, encoded, held, lost, strict=True)
        ]

    def _encode(self, texts: Sequence[str], *, plain: bool = False) -> list[list[int]]:
        if not texts:
            return []
        whole = [text.encode("utf-8", "replace").decode() for text in texts]  # half a surrogate pair has no tokens
        found = self._tokenizer(
            whole, add_special_tokens=False, split_special_tokens=plain, return_attention_mask=False
        )
        return [list(ids) for ids in found["input_ids"]]

    def _continues(self, before: str) -> bool:
        return bool(before) and not (self._after_specials and before.endswith(self._specials))

    def _find_sentinel(self) -> tuple[str, list[int]]:
        """The first prefix that is tokenized separately from the text after it."""
        unknown = self._tokenizer.unk_token_id
        for sentinel in SENTINELS:
            alone, followed = self._encode([sentinel, sentinel + "a"])
            if unknown not in alone and followed[: len(alone)] == alone:
                return sentinel, alone
        return "", []

    def _puts_space_after_specials(self) -> bool:
        for special in self._specials:
            token, text, both = self._encode([special, "x", special + "x"])
            if len(token) == 1:
                return both == list(chain(token, text))
        return False
