"""The plan of `benchmarks/evidence.py`: families, arms, seeds and budgets, fixed before the first run.

A change here is a new experiment: docs/evidence.md must state it, and report the earlier runs too.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rstar_ray.tiny.families import SIZES, Family, Numbers, _multiples_and_more, _three, _three_falling
from rstar_ray.tiny.tiny_problems import Question, Split, generate_problems
from rstar_ray.trajectory import Problem

SFT = "--tiny.slips 0.65"
"""The teacher of all arms slips more than in `make train`, so that no arm solves everything before its end."""
ROC_2 = "--algorithm.resample paper --algorithm.least-failures 2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Training stages from a seed's SFT policy, and an evaluation at the end."""

    name: str
    stages: tuple[tuple[str, str], ...] = ()  # recipe and its options
    samples: int = 16  # rollouts per problem of the evaluation
    prefixes: bool = False  # of part B's problems: prefixes of their programs are trained too


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Arms with the same seeds, which are compared with the first."""

    title: str
    seeds: int
    arms: tuple[Arm, ...]
    composed: bool = False  # trains and evaluates on part B's problems
    compared_with: tuple[str, str] = ("", "")  # part and arm with which all arms are compared, in place of the first


def _stage_1(
    name: str, options: str, *, steps: int = 45, samples: int = 16, rate: str = "3e-4", prefixes: bool = False
) -> Arm:
    """One stage with budgets of tokens and turns that rollouts do not reach."""
    budget = f"--steps {steps} --optimizer.learning-rate {rate} --rollout.max-response-tokens 256 --rollout.max-turns 8"
    stages = (("stage1", f"{budget} --evaluate.every-steps 10 {options}"),)
    return Arm(name=name, stages=stages, samples=samples, prefixes=prefixes)


DISCOVERY = f"{ROC_2} --algorithm.rollouts-per-prompt 16 --algorithm.keep 8"
FEW_PROBLEMS = f"{ROC_2} --data.num-train 400"
"""Options of all arms of part E. 45 steps draw 1,440 problems: with 400 problems each is drawn again after about 12
steps; with the default of 4,000 none would be, and `--data.skip-solved` could not act.
"""


PARTS: dict[str, Part] = {
    "B": Part(
        title="Discovery: programs that SFT has not shown",
        seeds=5,
        composed=True,
        arms=(
            Arm(name="after SFT", samples=64),
            _stage_1("after RL", DISCOVERY, steps=90, samples=64),
        ),
    ),
    "C": Part(
        title="Controls",
        seeds=5,
        arms=(
            _stage_1("GRPO, 4", "--algorithm.resample none"),
            _stage_1("GRPO, 8 all trained", "--algorithm.resample none --algorithm.keep 8"),
            _stage_1("4 of 8 at random", "--algorithm.resample random"),
            _stage_1("RoC, paper", "--algorithm.resample paper --algorithm.least-failures 0"),
            _stage_1("RoC, 2 failures", ROC_2),
            _stage_1(
                "random reward",
                "--algorithm.resample none --own-folder benchmarks --reward.name evidence_rules:coin",
            ),
            _stage_1(
                "rejection sampling",
                "--algorithm.resample none --algorithm.keep 8 --algorithm.no-reject-equal-reward "
                "--own-folder benchmarks --algorithm.advantage evidence_rules:right_only "
                "--algorithm.loss evidence_rules:likelihood",
            ),
        ),
    ),
    "D": Part(
        title="Curriculum",
        seeds=3,
        arms=(
            Arm(
                name="three stages",
                stages=tuple((f"stage{number}", "--evaluate.every-steps 10") for number in (1, 2, 3)),
            ),
            _stage_1("one stage", ROC_2, steps=125, rate="1.5e-4"),  # as many tokens as three stages and their filter
        ),
    ),
    "E": Part(
        title="Refill and skipping",
        seeds=3,
        arms=(
            _stage_1("neither", FEW_PROBLEMS),
            _stage_1("refill", f"{FEW_PROBLEMS} --algorithm.refill-rounds 2"),
            _stage_1("skip solved", f"{FEW_PROBLEMS} --data.skip-solved 20"),
            _stage_1("both", f"{FEW_PROBLEMS} --algorithm.refill-rounds 2 --data.skip-solved 20"),
        ),
    ),
    "B2": Part(
        title="Discovery with prefixes: a curriculum by problems, added after part B's first seed",
        seeds=3,
        composed=True,
        compared_with=("B", "after RL"),
        arms=(_stage_1("after RL with prefixes", DISCOVERY, steps=90, samples=64, prefixes=True),),
    ),
}

# ---------------------------------------------------------------- part B's problems

PER_FAMILY, HELD_OUT_PER_FAMILY, SHOWN = 400, 40, 1_600
"""Training and held-out problems of each composed family, and training problems of the families in SFT."""


def _multiples(rng: random.Random, size: int) -> Numbers:
    return _multiples_and_more(rng, min(size, 2))


def _product(rng: random.Random, size: int) -> Numbers:
    return _three(rng, min(size, 2))


COMPOSED: tuple[Family, ...] = (
    Family(
        "sum_times_squared",
        ("Add {a} and {b}, multiply by {c} and square that.", "What is {c} times the sum of {a} and {b}, squared?"),
        _three,
        lambda n: ((n.a + n.b) * n.c) ** 2,
        commutes=True,
        results=3,
    ),
    Family(
        "lcm_plus_times",
        ("Take the lcm of {a} and {b}, add {c} and multiply by {c}.",),
        _multiples,
        lambda n: (math.lcm(n.a, n.b) + n.c) * n.c,
        commutes=True,
        results=3,
    ),
    Family(
        "difference_squared_times_plus",
        ("Take {b} from {a}, square it, multiply by {c} and add {c}.",),
        _three_falling,
        lambda n: (n.a - n.b) ** 2 * n.c + n.c,
        results=4,
    ),
    Family(
        "product_plus_squared_times",
        ("Multiply {a} by {b}, add {c}, square it and multiply by {c}.",),
        _product,
        lambda n: (n.a * n.b + n.c) ** 2 * n.c,
        commutes=True,
        results=4,
    ),
)
"""Each result takes one call that SFT shows; no family of SFT has these calls in sequence.

Answers are large, so that a wrong program is rarely correct by chance: with a held-out problem's numbers, programs of
SFT's families give 5 of the 160 answers.
"""

PREFIXES: tuple[Family, ...] = (
    Family(
        "sum_times",
        ("Add {a} and {b} and multiply by {c}.", "What is {c} times the sum of {a} and {b}?"),
        _three,
        lambda n: (n.a + n.b) * n.c,
        commutes=True,
        results=2,
    ),
    Family(
        "lcm_plus",
        ("Take the lcm of {a} and {b} and add {c}.",),
        _multiples,
        lambda n: math.lcm(n.a, n.b) + n.c,
        commutes=True,
        results=2,
    ),
    Family(
        "difference_squared",
        ("Take {b} from {a} and square it.",),
        _three_falling,
        lambda n: (n.a - n.b) ** 2,
        results=2,
    ),
    Family(
        "difference_squared_times",
        ("Take {b} from {a}, square it and multiply by {c}.",),
        _three_falling,
        lambda n: (n.a - n.b) ** 2 * n.c,
        results=3,
    ),
    Family(
        "product_plus",
        ("Multiply {a} by {b} and add {c}.",),
        _product,
        lambda n: n.a * n.b + n.c,
        commutes=True,
        results=2,
    ),
    Family(
        "product_plus_squared",
        ("Multiply {a} by {b}, add {c} and square it.",),
        _product,
        lambda n: (n.a * n.b + n.c) ** 2,
        commutes=True,
        results=3,
    ),
)
"""The first calls of the composed families. SFT shows only those of `lcm_plus` in sequence, before a third."""
PER_PREFIX, SHOWN_BESIDE_PREFIXES = 266, 800
"""Training problems of each prefix, and of the families in SFT beside them."""


def composed_problems(seed: int, split: Split, per_family: int, families: Sequence[Family] = COMPOSED) -> list[Problem]:
    """Different problems of these families, up to `per_family` each."""
    rng = random.Random(f"{seed} composed {split.value}")
    problems: dict[str, Problem] = {}
    for family in families:
        found: dict[str, Problem] = {}
        for _ in range(100 * per_family):
            question = Question(family, family.draw(rng, rng.choice(SIZES)), rng.randrange(len(family.phrasings)))
            if len(found) < per_family and question.split is split:
                found.setdefault(question.to_problem().id, question.to_problem())
        problems |= found
    return list(problems.values())


def training_problems(seed: int, *, prefixes: bool = False) -> list[Problem]:
    """Half composed problems, half of families in SFT; with `prefixes` 40 % composed, 40 % prefixes, 20 % of SFT."""
    composed = composed_problems(seed, Split.TRAIN, PER_FAMILY)
    if not prefixes:
        return composed + generate_problems(seed, Split.TRAIN, SHOWN)
    parts = composed_problems(seed, Split.TRAIN, PER_PREFIX, PREFIXES)
    return composed + parts + generate_problems(seed, Split.TRAIN, SHOWN_BESIDE_PREFIXES)


def heldout_problems() -> list[Problem]:
    """Held-out problems, the same for every seed."""
    return composed_problems(0, Split.HELD_OUT, HELD_OUT_PER_FAMILY)
