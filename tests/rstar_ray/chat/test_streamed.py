"""A turn shown as it comes: the same whatever pieces it comes in."""

from itertools import groupby

import pytest

from rstar_ray.chat.chat_profile import THOUGHTS
from rstar_ray.chat.streamed import Streamed

THINK, REASON = THOUGHTS[0], THOUGHTS[1]
CALLS = [("<tool_call>", "</tool_call>")]


def shown(pieces: list[str], **how: object) -> list[tuple[str, str]]:
    view = Streamed(how.get("thought", THINK), inside=bool(how.get("inside")), call_markers=CALLS)  # type: ignore[arg-type]
    heard = [one for piece in pieces for one in view.feed(piece)] + list(view.end())
    return [(kind.value, "".join(text for _, text in run)) for kind, run in groupby(heard, key=lambda one: one[0])]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1_000])
def test_thoughts_and_words_are_distinguished_and_calls_kept_back(size: int):
    text = 'Let < me <think>so </thin k</think>\nsay 1 < 2.\n<tool_call>{"a": "<think>"}</tool_call> and on <'
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert shown(pieces) == [("said", "Let < me "), ("thought", "so </thin k"), ("said", "\nsay 1 < 2.\n and on <")]


def test_a_thought_that_the_prompt_opened_continues_until_it_is_closed():
    assert shown(["so", "</think>yes"], inside=True) == [("thought", "so"), ("said", "yes")]


def test_a_call_inside_a_thought_is_thought_but_inside_rstar2s_reason_a_call():
    text = "a <tool_call>x</tool_call> b"
    assert shown([text], inside=True) == [("thought", text)]
    assert shown([text], inside=True, thought=REASON) == [("thought", "a  b")]


def test_what_may_become_a_marker_waits_for_the_next_piece():
    view = Streamed(THINK, inside=False, call_markers=CALLS)
    assert [text for _, text in view.feed("a <too")] == ["a "]
    assert [text for _, text in view.feed("ls>")] == ["<tools>"]
