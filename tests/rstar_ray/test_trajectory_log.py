import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rstar_ray.algorithm.update import SeenTokens
from rstar_ray.outcome import Outcome
from rstar_ray.run_dir.durable import read_rows
from rstar_ray.run_dir.trajectory_log import readable, split_turns, write_trajectories
from rstar_ray.trajectory import Problem
from tests.rstar_ray.fabricate import decode, trajectory

PROBLEM = Problem(id="sum-1", problem="What is 2 + 3?", answer="5", family="sum", difficulty=1)
RECOVERED = trajectory(
    PROBLEM,
    [
        ("<tool_call>\nprin(2+3)\n</tool_call><|im_end|>", "NameError: prin", Outcome.ERROR),
        ("<tool_call>\nprint(2+3)\n</tool_call><|im_end|>", "5", Outcome.OK),
        ("<answer>\\boxed{5}</answer><|im_end|>", "", None),
    ],
    reward=1.0,
)

OTHER = replace(RECOVERED.summary, rollout_id="sum-1/1")


def test_a_readable_trajectory_tells_its_turns_and_outcomes_in_order():
    row = readable(RECOVERED, decode, stage="stage1", step=10)
    assert list(row)[:2] == ["stage", "step"]
    assert (row["answer"], row["reward"], row["stop_reason"], row["num_failed"]) == ("5", 1.0, "answered", 1)
    assert [turn["outcomes"] for turn in row["turns"]] == [["error"], ["ok"], []]
    assert row["turns"][0]["completion"].startswith("<tool_call>\nprin(")
    assert "NameError" in row["turns"][0]["tool_response"]
    assert row["turns"][2]["tool_response"] is None
    assert row["prompt"].startswith("<|im_start|>user\nWhat is 2 + 3?")


def test_what_the_learner_saw_stands_with_the_tokens_of_its_turn(tmp_path: Path):
    sampled = int(RECOVERED.loss_mask.sum())
    entropies, diffs = np.linspace(0, 1, sampled, dtype=np.float32), np.full(sampled, -1.23456e-6, np.float32)
    diffs[1] = np.nan
    seen = {"sum-1/0": SeenTokens(entropies=entropies, logprob_diffs=diffs)}
    path = tmp_path / "step.jsonl"
    write_trajectories(path, [RECOVERED, replace(RECOVERED, summary=OTHER)], decode, seen=seen)
    row, other = read_rows(path)
    assert [len(turn["entropies"]) for turn in row["turns"]] == [turn["num_tokens"] for turn in row["turns"]]
    written = [entropy for turn in row["turns"] for entropy in turn["entropies"]]
    assert written == pytest.approx(entropies.tolist(), rel=5e-3)
    assert row["turns"][0]["logprob_diffs"][:3] == [-1.23e-06, None, -1.23e-06]
    assert {(turn["entropies"], turn["logprob_diffs"]) for turn in other["turns"]} == {(None, None)}


def test_completions_and_tool_texts_make_up_the_whole_response():
    ids = [token for completion, tool in split_turns(RECOVERED) for token in (*completion, *tool)]
    assert ids == RECOVERED.response_ids.tolist()


@pytest.mark.parametrize("text", ["∑ naïve 数", "line\nbreak\u2028and more"])
def test_any_text_survives_a_line_of_json(tmp_path: Path, text: str):
    path = tmp_path / "log.jsonl"
    write_trajectories(path, [trajectory(PROBLEM, [(text, "", None)], reward=0.0)], decode)
    assert read_rows(path)[0]["turns"][0]["completion"] == text


def test_the_text_of_a_large_step_is_never_in_memory_as_a_whole(tmp_path: Path):
    path = tmp_path / "step.jsonl"
    tracemalloc.start()
    write_trajectories(path, [RECOVERED] * 200, decode)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < path.stat().st_size / 2


def test_a_write_that_fails_leaves_the_earlier_file_and_no_part_of_the_new_one(tmp_path: Path):
    path = tmp_path / "step.jsonl"
    write_trajectories(path, [RECOVERED], decode, step=1)

    def refuses(token_ids: Sequence[int]) -> str:
        raise ValueError("unknown token")

    with pytest.raises(ValueError, match="unknown token"):
        write_trajectories(path, [RECOVERED], refuses, step=2)
    assert [row["step"] for row in read_rows(path)] == [1] and list(tmp_path.iterdir()) == [path]
