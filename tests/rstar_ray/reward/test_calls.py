"""Calls that are written down against the right ones."""

import json

import pytest

from rstar_ray.reward.reward_calls import Written, read_wanted, same_calls, written_calls

ONE = [{"name": "area", "arguments": {"base": [10], "height": [5], "unit": ["units", ""]}}]
TWO = [{"name": "play", "arguments": {"artist": [one], "minutes": [20]}} for one in ("Taylor Swift", "Maroon 5")]


@pytest.mark.parametrize(
    "said",
    [
        "[area(base=10, height=5)]",
        "area(base=10.0, height=5, unit='Units')",
        "I call it.\n```python\n[area(base=10, height=5, unit='units')]\n```",
        '<answer>[{"name": "area", "arguments": {"base": 10, "height": 5}}]</answer>',
        '{"name": "area", "parameters": {"base": 10, "height": 5}}',
        "<think>[wrong(a=1)]</think>The call is [area(base=10, height=5)].",
    ],
)
def test_the_right_call_is_found_however_it_is_written(said: str):
    assert same_calls(said, read_wanted(json.dumps(ONE)))


@pytest.mark.parametrize(
    "said",
    [
        "[area(base=10)]",
        "[area(base=10, height=6)]",
        "[area(10, 5)]",
        "[area(base=10, height=5, depth=1)]",
        "[area(base=10, height=5), area(base=10, height=5)]",
        "[volume(base=10, height=5)]",
        "[area(base='10', height=5)]",
        "[area(base=True, height=5)]",
        "[area(base=__import__('os'), height=5)]",
        "[area(**{'base': 10, 'height': 5})]",
        "No function fits.",
        "[" * 5_000,
        "area(" * 3_000,
        "",
    ],
)
def test_any_other_is_wrong_and_nothing_is_run(said: str):
    assert not same_calls(said, read_wanted(json.dumps(ONE)))


def test_several_calls_are_right_in_any_order():
    wanted = read_wanted(json.dumps(TWO))
    assert same_calls("[play(artist='Maroon 5', minutes=20), play(artist='taylor  swift', minutes=20)]", wanted)
    assert not same_calls("[play(artist='Maroon 5', minutes=20), play(artist='Maroon 5', minutes=20)]", wanted)


@pytest.mark.parametrize("said", ["[f(a=1), f(a=2)]", "[f(a=2), f(a=1)]"])
def test_a_call_that_fits_two_wanted_ones_leaves_each_its_own(said: str):
    wanted = read_wanted(json.dumps([{"name": "f", "arguments": {"a": values}} for values in ([1, 2], [1])]))
    assert same_calls(said, wanted) and not same_calls("[f(a=2), f(a=2)]", wanted)


def test_where_no_function_fits_the_right_answer_calls_none():
    assert same_calls("None of them fits.", read_wanted("[]"))
    assert not same_calls("[area(base=1)]", read_wanted("[]"))


def test_values_may_be_lists_and_objects():
    wanted = read_wanted(json.dumps([{"name": "a.b", "arguments": {"x": [[1, 2]], "o": [{"k": ["v", ""], "n": [1]}]}}]))
    assert same_calls("[a.b(x=[1, 2], o={'n': 1})]", wanted) and same_calls(
        "[a.b(x=(1, 2), o={'n': 1, 'k': 'V'})]", wanted
    )
    assert not same_calls("[a.b(x=[2, 1], o={'n': 1})]", wanted) and not same_calls("[a.b(x=[1, 2], o={})]", wanted)
    assert written_calls("[a.b(x=1)]") == [Written("a.b", {"x": 1})]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("x", "is not JSON"),
        ("{}", "holds no list of calls"),
        ('[{"name": "f"}]', 'call 1 has no "name" and "arguments"'),
        ('[{"name": "f", "arguments": {"a": 1}}]', "call 1 names no values for a"),
    ],
)
def test_a_truth_that_names_no_calls_is_refused(truth: str, message: str):
    with pytest.raises(ValueError, match=message):
        read_wanted(truth)
