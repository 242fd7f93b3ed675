from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rstar_ray.outcome import Outcome
from rstar_ray.trajectory import Problem, StopReason, ToolResult, Trajectory, TrajectorySummary, Turn
from rstar_ray.wire import decode_trajectory, encode_trajectory, read_archive, write_archive

ARRAYS = ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "policy_versions")
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e6)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(0, 12))
    results = st.builds(ToolResult, outcome=st.sampled_from(Outcome), text=text, wall_s=seconds)
    turn = st.builds(
        Turn,
        num_tokens=counts,
        policy_version=counts,
        tool_results=st.lists(results, max_size=2).map(tuple),
        generate_s=seconds,
        tool_s=seconds,
    )
    summary = st.builds(
        TrajectorySummary,
        **dict.fromkeys(("rollout_id", "group_id", "problem_id"), text),
        **{name: counts for name in TrajectorySummary.__dataclass_fields__ if name.startswith(("num_", "policy_"))},
        **dict.fromkeys(("reward", "generate_s", "tool_s", "verify_s"), seconds),
        stop_reason=st.sampled_from(StopReason),
        outcomes=st.lists(st.sampled_from(Outcome), max_size=3).map(tuple),
    )
    problem = st.builds(Problem, id=text, problem=text, answer=text, family=text, difficulty=st.floats(0, 10))

    def array(elements: st.SearchStrategy, dtype: type) -> np.ndarray:
        return np.array(draw(st.lists(elements, min_size=length, max_size=length)), dtype=dtype)

    return Trajectory(
        summary=draw(summary),
        problem=draw(problem),
        prompt_ids=array(counts, np.int32),
        response_ids=array(counts, np.int32),
        loss_mask=array(st.booleans(), np.bool_),
        rollout_logprobs=array(st.floats(-100, 0, width=32), np.float32),
        policy_versions=array(st.integers(-1, 1000), np.int32),
        turns=tuple(draw(st.lists(turn, max_size=3))),
    )


def assert_same(one: Trajectory, other: Trajectory) -> None:
    assert (one.summary, one.problem, one.turns) == (other.summary, other.problem, other.turns)
    for name in ARRAYS:
        there, back = getattr(one, name), getattr(other, name)
        assert back.dtype == there.dtype and back.flags.writeable
        np.testing.assert_array_equal(there, back)


@settings(max_examples=30, deadline=None)
@given(trajectories())
def test_a_trajectory_comes_back_as_it_went(trajectory: Trajectory):
    assert_same(trajectory, decode_trajectory(encode_trajectory(trajectory)))


@settings(max_examples=30, deadline=None)
@given(st.lists(trajectories(), max_size=3))
def test_an_archive_gives_back_its_trajectories_in_order(
    tmp_path_factory: pytest.TempPathFactory, kept: list[Trajectory]
):
    path: Path = tmp_path_factory.mktemp("archive") / "step.msgpack"
    write_archive(path, kept)
    back = list(read_archive(path))
    assert len(back) == len(kept)
    for one, other in zip(kept, back, strict=True):
        assert_same(one, other)


def test_another_version_is_refused_by_name():
    with pytest.raises(ValueError, match="version 99"):
        decode_trajectory(msgpack.packb({"version": 99}))
