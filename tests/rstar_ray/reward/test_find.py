"""Where the answer stands."""

import pytest

from rstar_ray.reward.find import (
    Place,
    as_integer,
    boxed_answer,
    chosen_letter,
    count_answers,
    find_answer,
    last_program,
)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("<answer>\\boxed{42}</answer>", "42"),
        ("<answer>\\boxed{\\frac{1}{2}}</answer>", "\\frac{1}{2}"),
        ("<answer>\\boxed{1}</answer> no <answer>\\boxed{2}</answer>", "2"),
        ("<answer>\\boxed{1} or \\boxed{2}</answer>", "2"),
        ("\\boxed{42}", None),
        ("<answer>42</answer>", None),
        ("<answer>\\boxed{42</answer>", None),
        ("<answer>\\boxed{42}", None),
        ("<answer>\\boxed{5} so \\boxed{</answer>", "5"),
        ("<answer>\\boxed {5}</answer>", "5"),
        ("<answer>\\\\boxed{\\\\{1\\\\}}</answer>", "\\\\{1\\\\}"),
        ("<answer>\\boxed{\\left\\{x=1 \\\\{y} \\right.}</answer>", "\\left\\{x=1 \\\\{y} \\right."),
        ("", None),
    ],
)
def test_the_answer_is_what_stands_boxed_inside_the_answer_tags(text: str, boxed: str | None):
    assert boxed_answer(text) == boxed


def test_integers_are_read_with_signs_and_commas_only():
    assert as_integer(" 1,234 ") == 1234
    assert as_integer("-7") == -7
    assert as_integer("007") == 7
    assert as_integer("12,34") is None
    assert as_integer("3.0") is None
    assert as_integer("٣") is None
    assert as_integer("9" * 100_000) is None


@pytest.mark.parametrize(
    ("text", "place", "count"),
    [
        ("<answer></answer><answer>", "answer", 2),
        ("\\boxed{1}", "answer", 0),
        ("<think>\\boxed{1}</think> \\boxed{2}, so \\boxed{2}", "boxed", 2),
        ("<think>\\boxed{1}</think> <answer>2</answer>", "boxed", 0),
        ("<answer>\\boxed{2}</answer>", "anywhere", 1),
        ("<answer>1</answer> <answer>2</answer>", "anywhere", 2),
        ("The answer is 7.", "anywhere", 1),
        ("I give up.", "anywhere", 0),
    ],
)
def test_answers_are_counted_where_they_are_read(text: str, place: Place, count: int):
    assert count_answers(text, place) == count


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("<think>\\boxed{1}</think> so \\boxed{2}.", "boxed", "2"),
        ("<think>\\boxed{1} and on and on", "boxed", None),
        ("<think>\\boxed{1}</think> so 2.", "boxed", None),
        ("<answer>\\boxed{1}</answer> or \\boxed{2}", "answer", "1"),
        ("<answer>\\boxed{1}</answer> or \\boxed{2}", "boxed", "2"),
        ("<reason>The answer is 1.</reason> The final answer is: **7**.", "anywhere", "7"),
        ("<answer>8</answer>", "anywhere", "8"),
        ("Answer: 1\nAnswer: 9", "anywhere", "9"),
        ("I give up.", "anywhere", None),
    ],
)
def test_models_of_other_habits_are_read_after_their_thought(text: str, place: Place, found: str | None):
    assert find_answer(text, place) == found


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"), ("(b)", "B"), ("\\text{C}", "C"), ("D) 12", "D"), ("A.", "A"), ("**B**", "B"),
        ("$\\mathbf{(E)}$", "E"),
        ("Bananas", None), ("12", None), ("", None), ("A or B", None),
        ("A, C", None), ("(A), (B)", None), ("A,B,C,D", None), ("A, C and D", None), ("A, C.", None),
        ("B, because A is odd", "B"),
    ],
)  # fmt: skip
def test_a_choice_is_one_letter(text: str, letter: str | None):
    assert chosen_letter(text) == letter


def test_the_last_fenced_program_counts_and_none_of_a_thought():
    assert last_program("<think>```python\n1\n```</think> so\n```python\nprint(2)\n```") == "print(2)\n"
    assert last_program("<answer>print(3)</answer>") == "print(3)"
    assert last_program("no program") is None
