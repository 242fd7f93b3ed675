"""Plausible trajectories and run directories, made up for tests."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rstar_ray.algorithm.update import SeenTokens, UpdateResult
from rstar_ray.config import RunConfig
from rstar_ray.evaluation.evaluator import protocol
from rstar_ray.evaluation.figures import evaluate
from rstar_ray.evaluation.results import ProblemResult
from rstar_ray.outcome import Outcome
from rstar_ray.run_dir.durable import append_row, to_row, write_json, write_text
from rstar_ray.run_dir.manifest import checkpoint_name
from rstar_ray.run_dir.metrics import BalancerStats, StepMetrics, step_metrics
from rstar_ray.run_dir.trajectory_log import write_trajectories
from rstar_ray.trajectory import Placement, Problem, StopReason, ToolResult, Trajectory, TrajectorySummary, Turn


def encode(text: str) -> list[int]:
    """One token per character."""
    return [ord(character) for character in text]


def write_rows(path: Path, *rows: object) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def trajectory(
    problem: Problem, turns: Sequence[tuple[str, str, Outcome | None]], *, reward: float, sibling: int = 0
) -> Trajectory:
    """From (completion, tool text, outcome of its one call) per turn; the last turn has neither of the two."""
    prompt_ids = encode(f"<|im_start|>user\n{problem.problem}<|im_end|>\n<|im_start|>assistant\n")
    response_ids: list[int] = []
    loss_mask: list[bool] = []
    for completion, tool_text, outcome in turns:
        after = ""
        if outcome is not None:
            after = (
                f"\n<|im_start|>user\n<tool_response>\n{tool_text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
            )
        response_ids += encode(completion) + encode(after)
        loss_mask += [True] * len(completion) + [False] * len(after)
    outcomes = tuple(outcome for _, _, outcome in turns if outcome is not None)
    told = summary(
        problem.id, sibling, reward=reward, sampled=sum(loss_mask), response=len(response_ids), generate_s=0.0
    )
    return Trajectory(
        summary=replace(
            told,
            num_calls=len(outcomes),
            num_failed=sum(outcome.failed for outcome in outcomes),
            num_turns=len(turns),
            num_prompt_tokens=len(prompt_ids),
            outcomes=outcomes,
        ),
        problem=problem,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        response_ids=np.array(response_ids, dtype=np.int32),
        loss_mask=np.array(loss_mask, dtype=np.bool_),
        rollout_logprobs=np.where(loss_mask, -0.5, 0.0).astype(np.float32),
        policy_versions=np.where(loss_mask, 3, -1).astype(np.int32),
        turns=tuple(
            Turn(
                num_tokens=len(completion),
                tool_results=() if outcome is None else (ToolResult(outcome=outcome, text=tool_text, wall_s=0.01),),
                generate_s=0.2,
                tool_s=0.01,
            )
            for completion, tool_text, outcome in turns
        ),
    )


def seen_tokens(one: Trajectory) -> SeenTokens:
    """An entropy of a quarter nat everywhere, and a learner that agrees to 1e-5, always above."""
    sampled = int(one.loss_mask.sum())
    return SeenTokens(entropies=np.full(sampled, 0.25, np.float32), logprob_diffs=np.full(sampled, 1e-5, np.float32))


def summary(
    group: str = "g0",
    sibling: int = 0,
    *,
    reward: float = 1.0,
    calls: int = 1,
    failed: int = 0,
    sampled: int = 60,
    response: int = 80,
    stop: StopReason = StopReason.ANSWERED,
    answer: str = "",
    generate_s: float = 1.0,
    tool_s: float = 0.0,
    verify_s: float = 0.0,
) -> TrajectorySummary:
    return TrajectorySummary(
        rollout_id=f"{group}/{sibling}",
        group_id=group,
        problem_id=group,
        reward=reward,
        num_calls=calls,
        num_failed=failed,
        num_answers=1,
        num_turns=calls + 1,
        num_prompt_tokens=20,
        num_response_tokens=response,
        num_sampled_tokens=sampled,
        stop_reason=stop,
        answer=answer,
        outcomes=(Outcome.ERROR,) * failed + (Outcome.OK,) * (calls - failed),
        generate_s=generate_s,
        tool_s=tool_s,
        verify_s=verify_s,
    )


FAMILIES = ("arithmetic", "remainder", "gcd", "lcm", "power", "sum", "count_primes", "divisors", "linear")
UPDATE = UpdateResult(
    applied=True,
    reason="",
    step=1,
    metrics={
        "loss": -0.01,
        "grad_norm": 0.4,
        "entropy": 0.2,
        "clip_frac": 0.0,
        "logprob_diff_mean": 1e-7,
        "logprob_diff_max": 1e-6,
        "lr": 1e-4,
    },
)
STAY = Placement(
    replica_id="generation/0",
    turn=0,
    why="most room by expected KV",
    waited_s=2.5,
    held_s={"no replica has room in its KV cache for the next in line": 1.5},
    kv_used_tokens=512,
    kv_expected_tokens=1_536,
    kv_capacity_tokens=2_048,
    residents=12,
)
STAGES = {"stage1": 30, "stage2": 20, "stage3": 16}


def run_directory(path: Path, *, seed: int = 0, resample: str = "paper", stages: dict[str, int] | None = None) -> Path:
    """A run that went well: pass@1 rises to about 90 %, tool errors fall under 1 % (to 12 % under `none`)."""
    rng = random.Random(seed)
    stages = STAGES if stages is None else stages
    path.mkdir(parents=True)
    config = {"seed": seed, "scale": "tiny", "algorithm": {"rollouts_per_prompt": 16, "keep": 8, "resample": resample}}
    write_json(path / "config.json", {stage: config | {"stage": stage} for stage in ("sft", *stages)})
    launch = {"stage": "sft", "started_at": "2026-01-05T10:00:00+00:00", "platform": "Linux", "cpus": 2}
    append_row(path / "launches.jsonl", launch | {"versions": {"python": "3.11.9", "torch": "2.13.0"}})
    rows: list[StepMetrics] = []
    for step in range(1, 101):
        loss = 4.9 * math.exp(-step / 18) + 0.06 + rng.random() * 0.02
        values = {"loss": loss, "lr": 1e-3, "tokens_per_s": 9_000, "step_s": 0.4}
        values |= {"val_loss": loss * 1.05} if step % 20 == 0 else {}
        rows.append(StepMetrics(stage="sft", step=step, values=values))
    _append_evaluation(path, rng, "sft", 100, solved=0.45, errors=0.19)
    done, num_steps = 0, sum(stages.values())
    for stage, steps in stages.items():
        for step in range(1, steps + 1):
            done += 1
            solved, errors = _skill(done / num_steps, resample)
            rows.append(_step(rng, stage, step, solved, errors))
            if step % 10 == 0 or step == steps:
                _append_evaluation(path, rng, stage, step, solved=solved, errors=errors)
    write_text(path / "metrics.jsonl", "".join(to_row(row.as_row()) for row in rows))
    last, num_last = list(stages.items())[-1] if stages else ("sft", 100)
    for name, stage, step, reward in (
        ("sft-held-out", "sft", 100, 0.0),
        (f"{last}-step-000001", last, 1, 1.0),
        (f"{last}-held-out", last, num_last, 1.0),
    ):
        shown = example_trajectories(reward)
        shown[0] = replace(shown[0], summary=replace(shown[0].summary, placements=(STAY,)))
        seen = {one.summary.rollout_id: seen_tokens(one) for one in shown[:2]} if "-step-" in name else {}
        write_trajectories(path / "trajectories" / f"{name}.jsonl", shown, decode, seen=seen, stage=stage, step=step)
    if stages:
        (path / "finished").mkdir()
        ended = {"stage": last, "step": num_last, "finished_at": "2026-01-05T10:11:30+00:00"}
        write_json(path / "finished" / f"{last}.json", ended)
    return path


def _skill(progress: float, resample: str) -> tuple[float, float]:
    """(pass rate, tool-error share) after this part of the RL steps."""
    solved = 0.45 + 0.49 * (1 - math.exp(-3 * progress))
    return solved, 0.19 * math.exp(-5 * progress) if resample != "none" else 0.12 + 0.07 * math.exp(-4 * progress)


def _draw(rng: random.Random, group: str, sibling: int, solved: float, errors: float) -> TrajectorySummary:
    calls = rng.choice((1, 1, 2))
    failed = sum(rng.random() < errors for _ in range(calls))
    return replace(
        summary(group, sibling, reward=float(rng.random() < solved), calls=calls, failed=failed),
        num_response_tokens=rng.randint(60, 90) + 45 * failed,
        stop_reason=StopReason.TRUNCATED if rng.random() < 0.02 else StopReason.ANSWERED,
        generate_s=2.0,
        tool_s=0.35,
        verify_s=0.05,
    )


def _step(rng: random.Random, stage: str, step: int, solved: float, errors: float) -> StepMetrics:
    rollouts = [_draw(rng, f"g{group}", sibling, solved, errors) for group in range(16) for sibling in range(16)]
    wall_s = 5 + rng.random()
    metrics = step_metrics(
        rollouts,
        stage=stage,
        step=step,
        policy_version=step,
        learner_version=step,
        kept_ids=[rollout.rollout_id for rollout in rollouts[::2]],
        seconds={"rollout_s": wall_s, "learn_s": 2.2, "publish_s": 0.15, "step_s": wall_s + 2.6},
        update=UPDATE,
    )
    placed = BalancerStats(
        values={
            "balancer/queue_len_max": 40,
            "balancer/in_flight_max": 24,
            "balancer/kv_util_mean": 0.5,
            "balancer/kv_util_max": 0.8,
            "balancer/kv_reserved_mean": 0.75,
            "balancer/kv_reserved_max": 0.97,
            "balancer/num_preemptions": 1,
            "balancer/num_moves": 2,
            "balancer/num_recomputed_tokens": 50,
            "balancer/wait_p50_s": 0.5,
            "balancer/wait_p99_s": 2.5,
        },
        rule="expected_kv",
        quarantined=("generation/1: reports 5 KV tokens in use of 4",) if step > 1 else (),
    )
    return metrics.plus(placed.values, balancer=placed.details)


def results_of(problems: Sequence[Problem], rollouts: Sequence[TrajectorySummary]) -> list[ProblemResult]:
    return [
        ProblemResult.of(problem, [rollout for rollout in rollouts if rollout.problem_id == problem.id])
        for problem in problems
    ]


def _append_evaluation(path: Path, rng: random.Random, stage: str, step: int, *, solved: float, errors: float) -> None:
    problems = [
        Problem(id=f"{family}-{number}", problem="?", answer="1", family=family, difficulty=1 + number % 3)
        for family in FAMILIES
        for number in range(12)
    ]
    rollouts = [
        _draw(rng, problem.id, sibling, solved - 0.04 * FAMILIES.index(problem.family) * (1 - solved) * 3, errors)
        for problem in problems
        for sibling in range(4)
    ]
    row = evaluate(results_of(problems, rollouts), stage=stage, step=step).as_row() | protocol(RunConfig())
    rows = f"evaluations/{checkpoint_name(stage, step)}-held-out-0f3a.jsonl"
    append_row(path / "evaluations.jsonl", row | {"problems": rows})


def example_trajectories(reward: float) -> list[Trajectory]:
    """A straight one, one that recovers from an error, one without a tool, and one whose text tries to be HTML."""
    gcd = Problem(id="gcd-17", problem="What is the gcd of 84 and 126?", answer="42", family="gcd", difficulty=2)
    total = Problem(
        id="sum-3", problem="Sum the squares from 1 to 12.", answer="650", family="sum_over_range", difficulty=3
    )
    evil = Problem(id="evil", problem="Is 1 < 2 & 3 > 2? <script>alert(1)</script>", answer="1", family="gcd")
    wrong = "0" if reward == 0 else ""
    return [
        trajectory(
            gcd,
            [
                (_call("import math\nprint(math.gcd(84, 126))"), "42", Outcome.OK),
                (f"The tool says 42. <answer>\\boxed{{42{wrong}}}</answer><|im_end|>", "", None),
            ],
            reward=reward,
        ),
        trajectory(
            total,
            [
                (
                    _call("print(sum(i**2 for i in rang(1, 13)))"),
                    "NameError: name 'rang' is not defined",
                    Outcome.ERROR,
                ),
                (_call("print(sum(i**2 for i in range(1, 13)))"), "650", Outcome.OK),
                ("<answer>\\boxed{650}</answer><|im_end|>", "", None),
            ],
            reward=1.0,
        ),
        trajectory(gcd, [("I guess <answer>\\boxed{7}</answer><|im_end|>", "", None)], reward=0.0, sibling=1),
        trajectory(
            evil,
            [
                (
                    "<tool_call>\n{broken ```json\n</tool_call><|im_end|>",
                    "Error: <b>could</b> not be read ```",
                    Outcome.INVALID,
                ),
                ("</details><script>alert(2)</script><answer>\\boxed{1}</answer><|im_end|>", "", None),
            ],
            reward=reward,
        ),
    ]


def _call(code: str) -> str:
    arguments = json.dumps({"name": "python", "arguments": {"code": code}})
    return f"Let me compute it.\n<tool_call>\n{arguments}\n</tool_call><|im_end|>"
