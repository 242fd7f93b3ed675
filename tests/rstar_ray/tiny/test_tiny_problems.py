import itertools

import pytest

from rstar_ray.tiny.families import Numbers
from rstar_ray.tiny.programs import PROGRAMS, Step
from rstar_ray.tiny.tiny_problems import Question, Split, draw_questions, generate_problems


def test_the_same_seed_gives_the_same_problems_and_a_longer_list_starts_with_the_shorter():
    assert generate_problems(3, "train", 50) == generate_problems(3, Split.TRAIN, 80)[:50]
    assert generate_problems(3, "train", 50) != generate_problems(4, "train", 50)


def test_ids_are_unique_and_depend_on_the_question_alone():
    first = {p.problem: p.id for p in generate_problems(1, "train", 1500)}
    second = {p.problem: p.id for p in generate_problems(2, "train", 1500)}
    assert len(set(first.values())) == 1500
    shared = first.keys() & second.keys()
    assert shared
    assert all(first[text] == second[text] for text in shared)


def test_no_question_is_in_two_splits_in_any_wording():
    asked: dict[Split, set[int]] = {}
    for split in Split:
        asked[split] = {q.fingerprint for q in itertools.islice(draw_questions(5, split), 1500)}
    for one, other in itertools.combinations(Split, 2):
        assert not asked[one] & asked[other]


def test_a_rewording_stays_in_its_split():
    for question in itertools.islice(draw_questions(0, Split.HELD_OUT), 100):
        for phrasing in range(len(question.family.phrasings)):
            assert Question(question.family, question.numbers, phrasing).split is Split.HELD_OUT


def test_operands_that_change_places_stay_in_their_split():
    swaps = 0
    for question in itertools.islice(draw_questions(0, Split.HELD_OUT), 2_000):
        family, (a, b, c) = question.family, question.numbers
        swapped = Question(family, Numbers(b, a, c), question.phrasing)
        if family.commutes:
            assert swapped.split is Split.HELD_OUT and family.answer(swapped.numbers) == family.answer(question.numbers)
            swaps += a != b
    assert swaps > 500


def test_the_right_programs_compute_the_answer_and_a_slip_something_else(capsys: pytest.CaptureFixture[str]):
    agreeing = slipped = 0
    for question in itertools.islice(draw_questions(0, Split.TRAIN), 180):
        steps = PROGRAMS[question.family.name].steps
        truth = str(question.family.answer(question.numbers))
        assert _result(question.numbers, steps, None, capsys) == truth
        for place, step in enumerate(steps):
            for slip in step.slips:
                agreeing += _result(question.numbers, steps, (place, slip), capsys) == truth
                slipped += 1
    assert agreeing <= 0.1 * slipped  # 15 // 4 == 15 % 4 and the like, and sums of few digits


def _result(
    numbers: Numbers, steps: tuple[Step, ...], slip: tuple[int, str] | None, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the last call prints, with one of the calls replaced."""
    result = ""
    for place, step in enumerate(steps):
        template = slip[1] if slip and slip[0] == place else step.right
        exec(compile(template.format(**numbers._asdict(), r=result), "<tool>", "exec"), {})
        result = capsys.readouterr().out.strip()
    return result
