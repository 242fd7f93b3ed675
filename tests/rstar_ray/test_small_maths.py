import json
import math
from collections import Counter
from dataclasses import asdict

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from rstar_ray.algorithm.advantage import group_advantages, overlong_penalty, rewards_differ
from rstar_ray.chat.tool_calls import parse_tool_calls
from rstar_ray.config import DataConfig
from rstar_ray.data.order import DataPosition, draw, draw_mix, mix_counts
from rstar_ray.errors import ConfigError
from rstar_ray.seeds import derive_seed, named_generator
from rstar_ray.trajectory import Problem


def test_advantages_are_the_standardised_rewards_of_the_group():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    mean = sum(rewards) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 5)
    centred = pytest.approx([r - mean for r in rewards], abs=1e-12)
    assert group_advantages(rewards, deviation="population") * std == centred
    assert group_advantages(rewards, deviation="sample") * std * math.sqrt(5 / 4) == centred
    assert group_advantages(rewards, deviation="none") == centred


def test_equal_rewards_carry_no_signal():
    assert not rewards_differ([1.0, 1.0]) and not rewards_differ([])
    for scale in (1e-200, 1e200):  # whose squares are no float64
        scaled = group_advantages([scale * reward for reward in (1.0, 3.0, 2.0, 6.0)], deviation="population")
        assert scaled == pytest.approx(group_advantages([1.0, 3.0, 2.0, 6.0], deviation="population"))
    assert (group_advantages([1.0, 1.0], deviation="sample") == 0).all()
    assert group_advantages([], deviation="population").shape == (0,)


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.1 + 0.2, 0.3, 0.3], [-0.3, -0.1 - 0.2], [0.0, 0.0]])
def test_equal_is_what_differs_by_rounding_alone_in_any_container(rewards: list[float]):
    for given in (rewards, tuple(rewards), np.array(rewards), torch.tensor(rewards, dtype=torch.float64)):
        assert not rewards_differ(given)  # type: ignore[arg-type]
        assert (group_advantages(given, deviation="population") == 0).all()  # type: ignore[arg-type]
    assert rewards_differ([*rewards, rewards[0] + 1e-6])


def test_a_reward_that_is_not_a_number_is_refused():
    for wrong in (math.nan, math.inf):
        with pytest.raises(ValueError, match="rewards_G"):
            group_advantages([1.0, wrong], deviation="population")


def test_every_item_is_drawn_once_per_epoch_and_drawing_resumes_from_a_saved_position():
    items = list(range(7))
    whole, _ = draw(items, 14, DataPosition(), seed=1, stage="s")
    assert sorted(whole[:7]) == sorted(whole[7:]) == items
    first, position = draw(items, 5, DataPosition(), seed=1, stage="s")
    rest, _ = draw(items, 9, position, seed=1, stage="s")
    assert first + rest == whole
    assert draw(items, 7, DataPosition(), seed=2, stage="s")[0] != whole[:7]
    with pytest.raises(ValueError, match="nothing to draw"):
        draw([], 1, DataPosition(), seed=1, stage="s")


def problems_of(**sizes: int) -> list[Problem]:
    return [
        Problem(id=f"{family}-{i}", problem="?", answer="1", family=family)
        for family, size in sizes.items()
        for i in range(size)
    ]


def test_a_mix_draws_each_source_by_its_weight_and_floor_and_resumes_from_a_saved_position():
    problems, weights = problems_of(math=30, rare=4, search=20, other=9), {"math": 3.0, "search": 1.0, "rare": 0.05}

    def draws(first: int, last: int, position: DataPosition) -> tuple[list[list[Problem]], DataPosition]:
        drawn = list[list[Problem]]()
        for number in range(first, last + 1):
            counts = mix_counts(weights, 10, np.random.default_rng(number), floor=1)
            found, position = draw_mix(problems, counts, position, seed=1, stage="s")
            drawn.append(found)
        return drawn, position

    whole, _ = draws(1, 400, DataPosition())
    first, position = draws(1, 150, DataPosition())
    rest, _ = draws(151, 400, DataPosition.from_json(json.loads(json.dumps(asdict(position)))))
    assert first + rest == whole
    counts = [Counter(one.family for one in drawn) for drawn in whole]
    assert all(sum(count.values()) == 10 and len(count) == 3 for count in counts)
    shares = {name: 1 + 7 * weight / 4.05 for name, weight in weights.items()}
    for name, share in shares.items():
        assert {count[name] for count in counts} <= {math.floor(share), math.ceil(share)}
        assert sum(count[name] for count in counts) / 400 == pytest.approx(share, abs=0.1)
    of_math = [one.id for drawn in whole for one in drawn if one.family == "math"]
    assert sorted(of_math[:30]) == sorted(of_math[30:60]) == sorted(f"math-{i}" for i in range(30))


@hypothesis.given(
    st.lists(st.floats(0.01, 1000), min_size=1, max_size=6), st.integers(1, 60), st.integers(0, 9), st.integers(0, 9)
)
def test_the_counts_of_a_mix_add_up(weights: list[float], count: int, floor: int, seed: int):
    named = {str(number): weight for number, weight in enumerate(weights)}
    counts = mix_counts(named, count, np.random.default_rng(seed), floor=floor)
    assert sum(counts.values()) == count
    assert min(counts.values()) >= min(floor, count // len(weights))


@pytest.mark.parametrize("mix", [("math",), ("math=0",), ("math=x",), ("math=1", "math=2"), ("=1",), ("a=inf",)])
def test_what_is_not_a_mix_is_refused(mix: tuple[str, ...]):
    with pytest.raises(ConfigError, match=r"--data\.mix"):
        DataConfig(mix=mix)


def test_seeds_are_fixed_by_their_names():
    assert derive_seed(1, "a", 2) == derive_seed(1, "a", 2) != derive_seed(1, "a2")
    assert 0 <= derive_seed(0) < 2**63
    assert named_generator(1, "x").random() == named_generator(1, "x").random()
    assert len({derive_seed(0, "s", i) for i in range(10_000)}) == 10_000


def test_calls_are_parsed_and_what_cannot_be_is_still_a_call():
    body = '{"name": "python", "arguments": {"code": "print(1)", "input": "x"}}'
    (parsed,) = parse_tool_calls(f"let me see <tool_call>\n{body}\n</tool_call>")
    assert (parsed.code, parsed.stdin, parsed.parse_error) == ("print(1)", "x", None)
    assert parse_tool_calls("no call at all") == []
    broken = [
        "<tool_call>",
        "<tool_call>nonsense</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "bash", "arguments": {"code": "ls"}}</tool_call>',
        '<tool_call>{"name": "python"}</tool_call>',
        '<tool_call>{"name": "python", "arguments": {"code": 1}}</tool_call>',
        '<tool_call>{"name": "python", "arguments": {"code": "1", "input": 1}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ]
    for text in broken:
        (only,) = parse_tool_calls(text)
        assert only.parse_error, text[:60]
    two = parse_tool_calls(f"<tool_call>oops <tool_call>{body}</tool_call>")
    assert [call.parse_error is None for call in two] == [False, True]


def test_the_overlong_penalty_grows_linearly_over_the_buffer():
    """Eq. 13 of arXiv:2503.14476."""
    lengths = {0: 0.0, 150: 0.0, 175: -0.5, 200: -1.0, 259: -1.0}
    assert {one: overlong_penalty(one, limit=200, buffer=50) for one in lengths} == lengths
    assert overlong_penalty(10**6, limit=200, buffer=0) == 0
