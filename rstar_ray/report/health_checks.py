"""Health checks: the report's table of verdicts. Each check compares one figure of the run with a threshold.

The figures are of the last `WINDOW` RL steps of the newest stage. A threshold that is neither from a paper nor from a
setting of the run was chosen for this project and says so. Checks only inform: no code acts on them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rstar_ray.algorithm.stage_end import ALL_CORRECT, NEAR, TRUNCATED, WINDOW
from rstar_ray.report.findings import percent
from rstar_ray.report.run_record import Row, RunRecord, pooled
from rstar_ray.run_dir.folder import flatten

PAPER = "arXiv:2508.20722 section 4.3"
CHOSEN = "project default"
REWARD_FALL = 0.10
"""Fall of the mean reward below the best window of its stage."""
ENTROPY_LOW, ENTROPY_COLLAPSED = 0.05, 0.01
"""Nats per token."""
ENTROPY_GROWTH = 3.0
"""Factor on the entropy of the stage's first window."""
LOGPROB_DIFF = {"float32": 1e-5, "bfloat16": 1e-2}
"""Usual mean |engine - learner| per token, by dtype [nats]."""
LOGPROB_BAD = 5.0
"""Factor on the usual value."""
NO_SIGNAL, NO_SIGNAL_BAD = 0.75, 0.95
GRADIENT_SPIKE = 10.0
"""Factor on the stage's median."""
KV_IDLE = 0.5
RECOMPUTED, RECOMPUTED_BAD = 0.02, 0.10
"""Shares of the sampled tokens."""
RETRIED, RETRIED_BAD = 0.001, 0.01
MEMORY_GROWTH, MEMORY_GROWTH_BAD = 0.10, 0.30
"""Growth of the memory of one type of process since the stage's second `WINDOW` steps, as a share; smaller growth than
the next constant is ignored."""
LEAST_MEMORY_GROWTH = 200 * 2**20
DROPPED_BAD = 0.01
ERROR_RISE = 0.05


class CheckState(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """A row of the table."""

    signal: str
    state: CheckState
    current: str
    threshold: str
    source: str
    rl_step: int | None = None  # the step to look at first


@dataclass(frozen=True, slots=True)
class Window:
    """The last steps of a run's last stage (`late`), and the whole stage."""

    late: list[Row]
    stage: list[Row]
    run: RunRecord

    def mean(self, name: str) -> float | None:
        return _mean(self.late, name)

    def first(self, name: str) -> float | None:
        """The mean of the stage's first steps."""
        return _mean(self.stage[:WINDOW], name)

    def total(self, name: str) -> int:
        return sum(row[name] or 0 for row in self.late)

    def worst(self, name: str) -> int | None:
        """The RL step at which a metric was highest."""
        known = [row for row in self.late if row[name] is not None]
        return max(known, key=lambda row: row[name])["rl_step"] if known else None

    def setting(self, name: str) -> Any:
        """A dotted setting of the stage; None where it is not recorded."""
        return flatten(self.run.config.get(self.late[-1]["stage"], {})).get(name)

    def placed(self) -> list[Row]:
        """Steps that have statistics of the balancer."""
        return [row for row in self.late if row["balancer"]]


def _mean(rows: Sequence[Row], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return sum(known) / len(known) if known else None


def health_checks(run: RunRecord) -> list[HealthCheck]:
    """All checks that have data, the most important first; empty without an RL step."""
    if not run.steps:
        return []
    stage = [row for row in run.steps if row["stage"] == run.steps[-1]["stage"]]
    window = Window(stage[-WINDOW:], stage, run)
    found = (check(window) for check in CHECKS)
    return [one for one in found if one is not None]


def summary(found: Sequence[HealthCheck]) -> str:
    """ "11 of 13 health checks are ok; look at entropy, truncation; 1 has no verdict"."""
    ok = sum(one.state is CheckState.OK for one in found)
    known = sum(one.state is not CheckState.UNKNOWN for one in found)
    odd = [one.signal.lower() for one in found if one.state in (CheckState.WARN, CheckState.BAD)]
    look = f"; look at {', '.join(odd)}" if odd else ""
    unknown = len(found) - known
    undecided = f"; {unknown} {'has' if unknown == 1 else 'have'} no verdict" if unknown else ""
    return f"{ok} of {known} health checks are ok{look}{undecided}"


def _graded(value: float, warn: float, bad: float) -> CheckState:
    return CheckState.BAD if value > bad else CheckState.WARN if value > warn else CheckState.OK


def reward(window: Window) -> HealthCheck:
    """A falling reward; its level is not checked, since it depends on the task."""
    values = [row["reward_mean"] for row in window.stage]
    best = max(
        (sum(values[at : at + WINDOW]) / WINDOW for at in range(len(values) - WINDOW + 1)),
        default=sum(values) / len(values),
    )
    now = window.mean("reward_mean") or 0.0
    current = f"{now:.2f}; the stage's best {WINDOW} steps {best:.2f}"
    threshold = f"at most {REWARD_FALL:.2f} below the stage's best {WINDOW} steps"
    return HealthCheck("Reward", _graded(best - now, REWARD_FALL / 2, REWARD_FALL), current, threshold, CHOSEN)


def tool_errors(window: Window) -> HealthCheck | None:
    name = "tool_error_rate_correct"
    now, first = window.mean(name), window.first(name)
    if now is None or first is None:
        return None
    current = f"{percent(now)}, at first {percent(first)}"
    threshold = f"rises by less than {percent(ERROR_RISE, 0)} over the stage; resampling should make it fall"
    source = "arXiv:2508.20722 section 2.2; the number is a project default"
    state = _graded(now - first, ERROR_RISE / 2, ERROR_RISE)
    return HealthCheck("Tool errors in correct rollouts", state, current, threshold, source, window.worst(name))


def entropy(window: Window) -> HealthCheck:
    """Too low: the policy no longer explores. Far above the start: training diverges."""
    now, first = window.mean("entropy"), window.first("entropy")
    threshold = f"above {ENTROPY_LOW:g} nats per token, below {ENTROPY_GROWTH:g} times the stage's first {WINDOW} steps"
    source = "entropy collapse: arXiv:2503.14476 section 3.1; the numbers are project defaults"
    if now is None:
        return HealthCheck("Entropy", CheckState.UNKNOWN, "no update in these steps", threshold, source)
    state = CheckState.BAD if now < ENTROPY_COLLAPSED else CheckState.WARN if now < ENTROPY_LOW else CheckState.OK
    if first and now > ENTROPY_GROWTH * first:
        state = CheckState.BAD
    return HealthCheck("Entropy", state, f"{now:.3f} nats, at first {first or 0:.3f}", threshold, source)


def logprob_diff(window: Window) -> HealthCheck:
    """Whether the engine that samples and the learner that trains compute the same policy.

    Where older weights sampled trained tokens, the gap contains the updates since then and cannot show this. The
    effective sample size is then compared with the limit of the run.
    """
    now = window.mean("logprob_diff_mean")
    dtypes = {str(value) for name in ("engine.dtype", "learner.dtype") for value in window.run.setting(name)}
    dtype = "float32" if dtypes == {"float32"} else "bfloat16"
    usual = LOGPROB_DIFF[dtype]
    signal, threshold, source = (
        "Log-prob gap, engine to learner",
        f"mean below {usual:g} nats per token in {dtype}",
        CHOSEN,
    )
    if now is None:
        return HealthCheck(signal, CheckState.UNKNOWN, "no update in these steps", threshold, source)
    current = f"{now:.1e}, at most {max(row['logprob_diff_max'] or 0 for row in window.late):.1e}"
    if oldest := max(row.get("token_age_max") or 0 for row in window.late):
        steps = f"tokens sampled by weights up to {oldest} step{'s' * (oldest > 1)} older"
        return _effective_sample_size(window, signal, f"{current}; {steps}")
    state = _graded(now, usual, LOGPROB_BAD * usual)
    return HealthCheck(signal, state, current, threshold, source, window.worst("logprob_diff_mean"))


def _effective_sample_size(window: Window, signal: str, current: str) -> HealthCheck:
    known = [row for row in window.late if row.get("ess_tokens") is not None]
    limit = window.setting("algorithm.min_ess")
    if not known or limit is None:
        return HealthCheck(signal, CheckState.UNKNOWN, current, "none for tokens of older weights", CHOSEN)
    least = min(known, key=lambda row: row["ess_tokens"])
    return HealthCheck(
        signal,
        CheckState.WARN if least["ess_tokens"] < limit else CheckState.OK,
        f"{current}; effective sample size at least {least['ess_tokens']:.2f}",
        f"effective sample size at least {limit:g}; the gap has no threshold for tokens of older weights",
        "--algorithm.min-ess",
        least["rl_step"],
    )


def gradient(window: Window) -> HealthCheck | None:
    known = sorted(row["grad_norm"] for row in window.stage if row["grad_norm"] is not None)
    late = [row["grad_norm"] for row in window.late if row["grad_norm"] is not None]
    if not late:
        return None
    median = known[len(known) // 2]
    current = f"at most {max(late):.2f}, median of the stage {median:.2f}"
    threshold = f"above 0, below {GRADIENT_SPIKE:g} times the stage's median"
    state = CheckState.OK if 0 < max(late) <= GRADIENT_SPIKE * median else CheckState.WARN
    return HealthCheck("Gradient norm", state, current, threshold, CHOSEN, window.worst("grad_norm"))


def truncation(window: Window) -> HealthCheck:
    now, first = window.mean("frac_truncated") or 0.0, window.first("frac_truncated") or 0.0
    most = TRUNCATED + NEAR
    current = f"{percent(now)}, at first {percent(first)}"
    threshold = f"at most {percent(most, 0)} of the rollouts; above, use a larger budget"
    return HealthCheck(
        "Truncated rollouts", _graded(now, most, 2 * most), current, threshold, PAPER, window.worst("frac_truncated")
    )


def groups_without_signal(window: Window) -> HealthCheck:
    """Prompts whose kept siblings all have the same reward, and so no learning signal."""
    kept, dropped = window.total("groups_kept"), window.total("groups_dropped")
    share = dropped / (kept + dropped) if kept + dropped else 1.0
    empty = sum(not row["groups_kept"] for row in window.late)
    limit = next(iter(window.run.setting("max_empty_steps")), None)
    return HealthCheck(
        "Groups without signal",
        CheckState.BAD if empty else _graded(share, NO_SIGNAL, NO_SIGNAL_BAD),
        f"{percent(share, 0)} of the prompts, {empty} steps without signal",
        f"below {percent(NO_SIGNAL, 0)} of the prompts, and signal in every step",
        CHOSEN if limit is None else f"{CHOSEN}; --max-empty-steps {limit} ends the run",
        window.worst("groups_dropped"),
    )


def solved(window: Window) -> HealthCheck:
    now = window.mean("frac_all_correct") or 0.0
    threshold = (
        f"at most {percent(ALL_CORRECT, 0)} of the prompts all correct; above, the stage has little left to learn"
    )
    state = CheckState.WARN if now > ALL_CORRECT else CheckState.OK
    return HealthCheck("Prompts all correct", state, percent(now, 0), threshold, PAPER)


def kv_cache(window: Window) -> HealthCheck | None:
    if not (placed := window.placed()):
        return None
    of = pooled(placed)
    used, reserved, waiting = (of[f"balancer/{name}"] for name in ("kv_util_mean", "kv_reserved_mean", "queue_len_max"))
    current = f"{percent(used, 0)} in use, {percent(reserved, 0)} reserved, at most {waiting:,} waiting"
    threshold = f"above {percent(KV_IDLE, 0)} in use while rollouts wait"
    state = CheckState.WARN if waiting and used < KV_IDLE else CheckState.OK
    if state is CheckState.WARN and any(
        row.get("staleness") for row in placed
    ):  # rows do not have the draws of waiting rollouts
        state, threshold = CheckState.UNKNOWN, f"{threshold}; with --staleness no step may need them yet"
    return HealthCheck("KV cache", state, current, threshold, CHOSEN)


def preemptions(window: Window) -> HealthCheck | None:
    if not (placed := window.placed()):
        return None
    of = pooled(placed)
    share = of["balancer/num_recomputed_tokens"] / (of["tokens_generated"] or 1)
    count, moves = of["balancer/num_preemptions"], of["balancer/num_moves"]
    current = f"{count:,} preemptions, {moves:,} moves, {percent(share)} of the tokens recomputed"
    threshold = f"at most {percent(RECOMPUTED, 0)} of the sampled tokens recomputed"
    return HealthCheck("Preemptions", _graded(share, RECOMPUTED, RECOMPUTED_BAD), current, threshold, CHOSEN)


def memory(window: Window) -> HealthCheck | None:
    """Memory growth over steps, which can end a run after days. The first steps, which allocate, do not count."""
    prefix = "memory_bytes/"
    types = list(dict.fromkeys(name for row in window.late for name in row if name.startswith(prefix)))
    if not types:
        return None
    held = {name: _held(window.late, name) for name in types}
    current = f"{sum(held.values()) / 2**30:.1f} GiB in total"
    threshold = (
        f"no type of process grows by {percent(MEMORY_GROWTH, 0)} over the stage, after the first {WINDOW} steps"
    )
    before = {name: _held(window.stage[WINDOW : 2 * WINDOW], name) for name in types}
    if len(window.stage) < 3 * WINDOW or not any(before.values()):
        current = f"{current}; growth is computed from step {3 * WINDOW} on"
        return HealthCheck("Memory", CheckState.UNKNOWN, current, threshold, CHOSEN)
    grown = {
        name: held[name] / before[name] - 1
        for name in types
        if before[name] and held[name] - before[name] >= LEAST_MEMORY_GROWTH
    }
    if not grown:
        return HealthCheck("Memory", CheckState.OK, f"{current}; no growth", threshold, CHOSEN)
    most = max(grown, key=lambda name: grown[name])
    growth = f"{most.removeprefix(prefix)} +{percent(grown[most], 0)} to {held[most] / 2**30:.1f} GiB"
    state = _graded(grown[most], MEMORY_GROWTH, MEMORY_GROWTH_BAD)
    return HealthCheck("Memory", state, f"{current}; {growth}", threshold, CHOSEN)


def _held(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name, 0) for row in rows) / max(1, sum(name in row for row in rows))


def retries(window: Window) -> HealthCheck:
    rollouts, restarts, judged = (window.total(name) for name in ("rollouts", "restarts", "judge_retries"))
    return HealthCheck(
        "Retries",
        _graded((restarts + judged) / (rollouts or 1), RETRIED, RETRIED_BAD),
        f"{restarts:,} rollouts restarted, {judged:,} rewards computed again, of {rollouts:,}",
        f"at most {percent(RETRIED)} of the rollouts",
        CHOSEN,
        window.worst("restarts") if restarts else None,
    )


def dropped(window: Window) -> HealthCheck | None:
    """Rollouts lost to infrastructure failures: the step requested more than finished."""
    drawn = "keep" if window.setting("algorithm.resample") == "none" else "rollouts_per_prompt"
    per_prompt, prompts = window.setting(f"algorithm.{drawn}"), window.setting("prompts_per_step")
    if not per_prompt or not prompts or window.setting("algorithm.refill_rounds"):
        return None  # unknown, or it differs from step to step
    requested = per_prompt * prompts * len(window.late)
    lost = max(0, requested - window.total("rollouts"))
    state = CheckState.BAD if lost > DROPPED_BAD * requested else CheckState.WARN if lost else CheckState.OK
    threshold, source = f"none; bad above {percent(DROPPED_BAD, 0)}", f"{CHOSEN}; at half of a step the run ends"
    return HealthCheck("Dropped rollouts", state, f"{lost:,} of {requested:,}", threshold, source)


def balancer(window: Window) -> HealthCheck | None:
    if not (placed := window.placed()):
        return None
    faults = sum(bool(row["balancer"]["faults"]) for row in placed)
    quarantined = sorted({text for row in placed for text in row["balancer"]["quarantined"]})
    found = [f"inconsistent counters in {faults} steps"] * bool(faults) + [
        f"quarantined: {text}" for text in quarantined
    ]
    state = CheckState.BAD if faults else CheckState.WARN if quarantined else CheckState.OK
    threshold = "counters return to zero, no replica is quarantined"
    return HealthCheck("Balancer", state, "; ".join(found) or "consistent", threshold, "invariant")


CHECKS: tuple[Callable[[Window], HealthCheck | None], ...] = (
    reward, tool_errors, entropy, logprob_diff, gradient, truncation, groups_without_signal, solved,
    kv_cache, preemptions, memory, retries, dropped, balancer,
)  # fmt: skip
"""Checks in the order of the table."""
