"""Whatever a model writes is read in time proportional to its length.

The inputs are built from each reader's own markers: repeated, in pairs, nested, cut off, in a well-formed text of which
one part is repeated, and beside runs of whitespace. `python -m tests.rstar_ray.test_linear_time` prints the slowest
input of 30,000 characters per reader.
"""

import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

import pytest

from rstar_ray.chat.call_syntax import SYNTAXES
from rstar_ray.chat.chat_profile import THOUGHTS, Thought
from rstar_ray.chat.streamed import Streamed, spoken
from rstar_ray.chat.tool_calls import MAX_CALLS, MAX_CHARS, parse_tool_calls
from rstar_ray.report.segments import call_pieces, spans, tool_answers
from rstar_ray.reward.find import chosen_letter, find_answer, last_program
from rstar_ray.reward.reward_calls import written_calls
from rstar_ray.reward.verifiable import CHECKS, read_instructions, share_followed

SIZES = [20 * 2**step for step in range(11)]  # up to 20,480 characters
FLOOR_S = 0.003
"""CPU time below which a reading is not judged: nothing that is superlinear stays below it at 20,000 characters."""
MOST_SHAPES = 200
"""Of a reader, where it has fewer plain ones."""
MOST_RATIO = 3.0
"""Between a text and half of it; 2 is linear, 4 quadratic."""
BLANKS = (" ", "\n", " \n", "a", "1", "\\")


@dataclass(frozen=True)
class Reader:
    """Something that reads a model's text, and texts that it reads well."""

    read: Callable[[str], object]
    examples: Sequence[str]
    markers: Sequence[str] = ()  # beside those of the examples


def _reads_thoughts(thought: Thought) -> Callable[[str], object]:
    def read(text: str) -> None:
        for inside in (False, True):
            spoken(text, thought, inside=inside)

    return read


def _streams(piece: int) -> Callable[[str], object]:
    def read(text: str) -> None:
        view = Streamed(THOUGHTS[1], inside=False, call_markers=[("<tool_call>", "</tool_call>")])
        for start in range(0, len(text), piece):
            list(view.feed(text[start : start + piece]))

    return read


def _finds(text: str) -> None:
    for place in ("answer", "boxed", "anywhere"):
        find_answer(text, place)


def _reports(text: str) -> None:
    for span in spans(text):
        call_pieces(text[span.inner_start : span.inner_end])
    tool_answers({"tool_response": text, "outcomes": ["ok"]})


ASKED: dict[str, object] = {
    "keywords": ["a"], "keyword": "a", "frequency": 1, "forbidden_words": ["a1"], "letter": "a", "let_frequency": 1,
    "language": "en", "num_sentences": 1, "num_paragraphs": 2, "num_words": 1, "nth_paragraph": 1, "first_word": "a",
    "num_placeholders": 1, "postscript_marker": "P.P.S", "num_bullets": 1, "num_highlights": 1,
    "section_spliter": "Section", "num_sections": 1, "prompt_to_repeat": "a", "end_phrase": "a", "capital_frequency": 1,
}  # fmt: skip


def _checks(name: str) -> Callable[[str], object]:
    asked = {key: ASKED[key] for key in CHECKS[name][1]}
    instruction = read_instructions(json.dumps([{"name": name, "kwargs": asked}]))
    return lambda text: share_followed(text, instruction)


CALL_ARGUMENTS = {"code": '"x"', "in": "1"}
PROSE = 'Mr. A said: *one*.\n\n- **two** [three]\n***\n<<Title>> "four" P.P.S. Section 1\n{"a": 1}\n```\n5\n```!'
TAGGED = "<think>x</think> the answer is: <answer>\\boxed{\\frac{1}{2}}</answer>\n```python\nprint(1)\n```\n"
READERS = {
    **{
        name: Reader(syntax.read, [f"I see.\n{syntax.write('f', CALL_ARGUMENTS)}"], ["`", "```"])
        for name, syntax in SYNTAXES.items()
    },
    "mistral, named": Reader(SYNTAXES["mistral"].read, ['[TOOL_CALLS]f[CALL_ID]1[ARGS]{"code": "x"}']),
    "deepseek, V3.1": Reader(
        SYNTAXES["deepseek"].read, ['<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"c": 1}<｜tool▁call▁end｜>']
    ),
    "llama_json, tagged": Reader(
        SYNTAXES["llama_json"].read, ['<|python_tag|>{"name": "f", "parameters": {}}; {"a": 1}']
    ),
    **{
        f"thoughts {thought.opens}": Reader(
            _reads_thoughts(thought), [f"a {thought.opens} b {thought.closes} c"], ["<answer>", "</answer>"]
        )
        for thought in THOUGHTS
    },
    **{
        f"stream by {piece}": Reader(_streams(piece), ["<reason>a</reason> b <tool_call>c</tool_call>"])
        for piece in (100, 10**6)
    },
    "answers": Reader(_finds, [TAGGED]),
    "programs": Reader(last_program, [TAGGED]),
    "letters": Reader(chosen_letter, ["\\text{(B)} so"]),
    "written calls": Reader(written_calls, ['[{"name": "f", "arguments": {"a": 1}}]', '[f(a=1, b="x")]'], ["(", ")"]),
    "report": Reader(_reports, ["<reason>a</reason><tool_call>{\"b\": 1}</tool_call><answer>c</answer><|im_end|>\n",
                                "<tool_response>\n1\n</tool_response><|im_start|>user\n"]),
    **{name: Reader(_checks(name), [PROSE]) for name in CHECKS},
}  # fmt: skip

Shape = Callable[[int], str]
"""A text of about so many characters."""
Described = tuple[tuple[str, ...], Shape]
"""What a shape is made of, and the shape."""


def _repeated(head: str, unit: str, tail: str = "") -> Shape:
    return lambda size: head + unit * max(1, (size - len(head) - len(tail)) // len(unit)) + tail


def _two_runs(first: str, second: str) -> Shape:
    return lambda size: first * max(1, size // 2 // len(first)) + second * max(1, size // 2 // len(second))


_PART = re.compile(r"<[^<>\n]*>|\[/?[A-Z_]+\]|`+|\\[a-z]+|[*.]+|\w+|\s+|[^\w\s]")


def shapes(reader: Reader, most: int) -> list[Described]:
    """The plain shapes of a reader, and as many of the others at random as make `most`."""
    parts = [_PART.findall(example) for example in reader.examples]
    markers = list(dict.fromkeys([*(p for row in parts for p in row if not p[0].isalnum()), *reader.markers]))
    plain = dict(_plain_shapes(parts, [marker for marker in markers if not marker.isspace()]))
    other = [one for one in dict(_other_shapes(parts, markers)).items() if one[0] not in plain]
    random.Random(0).shuffle(other)
    return [*plain.items(), *other[: max(0, most - len(plain))]]


def _plain_shapes(parts: Sequence[Sequence[str]], markers: Sequence[str]) -> Iterator[Described]:
    """One marker, a pair, or a whole text over and over, beside whitespace or not; a long run after a marker."""
    units = [*markers, *map("".join, pairwise(markers)), *map("".join, parts)]
    for unit in units:
        yield ("repeat", unit), _repeated("", unit)
        for blank in BLANKS[:3]:
            yield ("blanks, then", blank, unit), _two_runs(blank, unit)
    for marker, blank in product(markers, BLANKS):
        yield ("marker and run", marker, blank), _repeated(marker, blank)
    for row in parts:
        for start in range(1, len(row)):
            head, unit = "".join(row[:start]), "".join(row[start:-1]) or row[-1]
            yield ("cut off", head, unit), _repeated(head, unit)


def _other_shapes(parts: Sequence[Sequence[str]], markers: Sequence[str]) -> Iterator[Described]:
    """Any two markers in turn, nested, or with something between; any part of a text repeated; the rest cut off."""
    for first, second in product(markers, repeat=2):
        yield ("nest", first, second), _two_runs(first, second)
        for blank in ("", *BLANKS):
            yield ("repeat", first, blank, second), _repeated("", first + blank + second)
    for marker, blank in product(markers, BLANKS):
        yield ("run and marker", blank, marker), _repeated("", blank, marker)
    for row in parts:
        for start, stop in combinations(range(len(row) + 1), 2):
            head, unit, tail = ("".join(part) for part in (row[:start], row[start:stop], row[stop:]))
            yield ("cut off", head, unit), _repeated(head, unit)
            yield ("part repeated", head, unit, tail), _repeated(head, unit, tail)


def cpu_s(read: Callable[[str], object], text: str, repeats: int = 1) -> float:
    """The least CPU time of a few readings."""
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        read(text)
        best = min(best, time.process_time() - started)
    return best


def grows_too_fast(read: Callable[[str], object], shape: Shape) -> str:
    """Sizes and times where twice the text takes more than `MOST_RATIO` times as long; empty where it never does.

    Sizes grow step by step, so that even an exponential reader is found out at once.
    """
    before = float("inf")
    for half, size in pairwise(SIZES):
        once = cpu_s(read, shape(size))
        if once > max(FLOOR_S, MOST_RATIO * before):
            pairs = [(cpu_s(read, shape(half), 5), cpu_s(read, shape(size), 5)) for _ in range(3)]
            small, large = min(pairs, key=lambda pair: pair[1] / pair[0])  # the least disturbed by other load
            if large > max(FLOOR_S, MOST_RATIO * small):
                return f"{half} characters {small:.4f} s, {size} characters {large:.4f} s"
        before = once
    return ""


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_reading_takes_time_in_proportion_to_the_length(name: str):
    for parts, shape in shapes(READERS[name], MOST_SHAPES):
        assert grows_too_fast(READERS[name].read, shape) == "", parts


DEEP = ["[" * 20_000, '{"a":' * 20_000, "<tool_call>" + "[" * 20_000 + "</tool_call>", "[TOOL_CALLS]" + "[" * 9_000]


@pytest.mark.parametrize("name", READERS)
def test_text_that_is_nested_deeply_raises_nothing(name: str):
    for text in (*DEEP, *(text + "]" * 20_000 for text in DEEP)):
        READERS[name].read(text)


@pytest.mark.parametrize("name", SYNTAXES)
def test_calls_in_a_text_above_the_limits_are_one_malformed_call(name: str):
    syntax = SYNTAXES[name]
    call = syntax.write("python", {"code": "1"})
    (too_long,) = parse_tool_calls(call + "\n" * MAX_CHARS, syntax)
    assert too_long.parse_error and "characters" in too_long.parse_error
    assert parse_tool_calls("I see.\n" + "a" * MAX_CHARS, syntax) == []
    separator = "; " if name == "llama_json" else "\n"
    (too_many,) = parse_tool_calls(separator.join([call] * (MAX_CALLS + 1)), syntax)
    assert too_many.parse_error and "at most" in too_many.parse_error
    assert len(parse_tool_calls(separator.join([call] * MAX_CALLS), syntax)) == MAX_CALLS


def main() -> None:
    print(f"{'reader':<46}{'inputs':>8}{'slowest, CPU ms':>17}")
    for name, reader in READERS.items():
        made = shapes(reader, 10**6)
        times = {parts: cpu_s(reader.read, shape(30_000)) for parts, shape in made}
        worst = sorted(made, key=lambda one: times[one[0]])[-3:]
        parts, best = max(((p, cpu_s(reader.read, shape(30_000), 5)) for p, shape in worst), key=lambda one: one[1])
        print(f"{name:<46}{len(made):>8,}{best * 1e3:>17.1f}  {parts!r:.80}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
