import itertools
import math
from collections import Counter

import pytest

from rstar_ray.tiny.conversations import PROGRAMS
from rstar_ray.tiny.problems import FAMILIES, Numbers, Question, Split, draw_questions, generate_problems


def test_the_world_has_fifteen_families_with_three_difficulties_each():
    seen = {(q.family.name, q.difficulty) for q in itertools.islice(draw_questions(0, Split.TRAIN), 2000)}
    assert len(FAMILIES) == 15
    assert seen == {(family.name, difficulty) for family in FAMILIES for difficulty in (1, 2, 3)}


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
            reworded = Question(question.family, question.numbers, phrasing, question.difficulty)
            assert reworded.split is Split.HELD_OUT


def test_operands_that_change_places_stay_in_their_split():
    twins = 0
    for question in itertools.islice(draw_questions(0, Split.HELD_OUT), 2_000):
        family, (a, b, c) = question.family, question.numbers
        swapped = Question(family, Numbers(b, a, c), question.phrasing, question.difficulty)
        if family.commutes:
            assert swapped.split is Split.HELD_OUT and family.answer(swapped.numbers) == family.answer(question.numbers)
            twins += a != b
    assert twins > 500


def test_a_family_commutes_exactly_where_the_order_never_matters():
    unequal = [Numbers(a, b, 3) for a, b in ((3, 8), (7, 4), (12, 5))]
    for family in FAMILIES:
        same = [family.answer(n) == family.answer(Numbers(n.b, n.a, n.c)) for n in unequal]
        assert all(same) is family.commutes, family.name


def test_families_are_even_in_every_split():
    for split in Split:
        counts = Counter(p.family for p in generate_problems(0, split, 240))
        assert len(counts) == len(FAMILIES)
        assert max(counts.values()) <= 24


def test_answers_are_integers_of_at_most_seven_characters():
    for problem in generate_problems(0, "train", 2000):
        assert math.isfinite(int(problem.answer))
        assert len(problem.answer) <= 7


def test_more_problems_than_the_split_holds_is_refused():
    with pytest.raises(ValueError, match="give at most 10000"):
        generate_problems(0, "held_out", 10_001)


def test_the_right_program_computes_the_answer_and_every_slip_something_else(capsys: pytest.CaptureFixture[str]):
    agreeing = 0
    questions = list(itertools.islice(draw_questions(0, Split.TRAIN), 600))
    for question in questions:
        program = PROGRAMS[question.family.name]
        truth = str(question.family.answer(question.numbers))
        assert _printed(program.right, question.numbers, capsys) == truth
        agreeing += sum(_printed(slip, question.numbers, capsys) == truth for slip in program.slips)
    assert agreeing <= 0.02 * len(questions)  # 15 // 4 == 15 % 4 and the like


def _printed(template: str, numbers: Numbers, capsys: pytest.CaptureFixture[str]) -> str:
    exec(compile(template.format(**numbers._asdict()), "<tool>", "exec"), {})
    return capsys.readouterr().out.strip()
