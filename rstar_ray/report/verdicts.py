"""Is the run well? A verdict for every signal, with the threshold that it is held to and where the threshold is from.

Over the last `WINDOW` RL steps. Where a threshold is not from a paper or a setting of the run, it is this project's own
choice and says so: it is there to make a person look, and nothing acts on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rstar_ray.algorithm.stage_end import ALL_RIGHT, NEAR, TRUNCATED, WINDOW
from rstar_ray.report.findings import percent
from rstar_ray.report.run_record import Row, RunRecord

PAPER = "arXiv:2508.20722 section 4.3"
CHOSEN = "chosen here"
REWARD_FALL = 0.10
"""Of the mean reward, below the best window of its stage."""
ENTROPY_LOW, ENTROPY_COLLAPSED = 0.05, 0.01
"""Nats per token."""
ENTROPY_GROWTH = 3.0
"""Times the stage's first window."""
LOGPROB_DIFF = {"float32": 1e-5, "bfloat16": 1e-2}
"""Mean |engine - learner| per token that is usual for a type of weights."""
LOGPROB_BAD = 5.0
"""Times what is usual."""
EMPTY_GROUPS, EMPTY_GROUPS_BAD = 0.75, 0.95
GRADIENT_SPIKE = 10.0
"""Times the median of the stage."""
KV_IDLE = 0.5
RECOMPUTED, RECOMPUTED_BAD = 0.02, 0.10
"""Of the tokens sampled, those computed again after preemptions and moves."""
RETRIED, RETRIED_BAD = 0.001, 0.01
MEMORY_GROWTH, MEMORY_GROWTH_BAD = 0.10, 0.30
"""Of what one kind of process held once the stage was warm, in the second `WINDOW` steps; and at least the next."""
LEAST_MEMORY_GROWTH = 200 * 2**20
DROPPED_BAD = 0.01
ERROR_RISE = 0.05


class State(StrEnum):
    """What a person should do about a signal."""

    WELL = "well"
    LOOK = "look"
    BAD = "bad"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One signal."""

    signal: str
    state: State
    value: str
    threshold: str
    source: str
    rl_step: int | None = None  # to look at first


@dataclass(frozen=True, slots=True)
class Window:
    """The last steps of a run's last stage, and what came before them in it."""

    late: list[Row]
    stage: list[Row]  # all of it, `late` too
    run: RunRecord

    def mean(self, name: str) -> float | None:
        return mean_of(self.late, name)

    def first(self, name: str) -> float | None:
        return mean_of(self.stage[:WINDOW], name)

    def worst(self, name: str) -> int | None:
        """The RL step at which a figure was highest."""
        known = [row for row in self.late if row[name] is not None]
        return max(known, key=lambda row: row[name])["rl_step"] if known else None

    def placed(self) -> list[Row]:
        return [row["balancer"] for row in self.late if row["balancer"]]


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    known = [row[name] for row in rows if row[name] is not None]
    return sum(known) / len(known) if known else None


def verdicts(run: RunRecord) -> list[Verdict]:
    """In the order in which one would ask; nothing without an RL step."""
    if not run.steps:
        return []
    stage = [row for row in run.steps if row["stage"] == run.steps[-1]["stage"]]
    window = Window(stage[-WINDOW:], stage, run)
    asked: list[Callable[[Window], Verdict | None]] = [
        reward, tool_errors, entropy, logprob_diff, gradient, truncation, empty_groups, solved,
        kv_use, preemptions, memory, retries, dropped, books,
    ]  # fmt: skip
    return [verdict for ask in asked if (verdict := ask(window)) is not None]


def summary(found: Sequence[Verdict]) -> str:
    """ "11 of 13 signals are well; look at entropy, truncation"."""
    well = sum(one.state is State.WELL for one in found)
    known = sum(one.state is not State.UNKNOWN for one in found)
    odd = [one.signal.lower() for one in found if one.state in (State.LOOK, State.BAD)]
    return f"{well} of {known} signals are well" + (f"; look at {', '.join(odd)}" if odd else "")


def _graded(value: float, look: float, bad: float) -> State:
    return State.BAD if value > bad else State.LOOK if value > look else State.WELL


def reward(window: Window) -> Verdict:
    """Falling is the sign; a level of its own says nothing."""
    values = [row["reward_mean"] for row in window.stage]
    best = max(
        (sum(values[at : at + WINDOW]) / WINDOW for at in range(len(values) - WINDOW + 1)),
        default=sum(values) / len(values),
    )
    now = window.mean("reward_mean") or 0.0
    fall = best - now
    shown = f"{now:.2f}; the stage's best {WINDOW} steps {best:.2f}"
    rule = f"falls by no more than {REWARD_FALL:.2f} below the stage's best {WINDOW} steps"
    return Verdict("Reward", _graded(fall, REWARD_FALL / 2, REWARD_FALL), shown, rule, CHOSEN)


def tool_errors(window: Window) -> Verdict | None:
    now, first = window.mean("tool_error_share_correct"), window.first("tool_error_share_correct")
    if now is None or first is None:
        return None
    rule = f"rise by less than {percent(ERROR_RISE, 0)} over the stage: resampling is there to make them fall"
    state = _graded(now - first, ERROR_RISE / 2, ERROR_RISE)
    source = "arXiv:2508.20722 section 2.2; the number is chosen here"
    worst = window.worst("tool_error_share_correct")
    shown = f"{percent(now)}, at first {percent(first)}"
    return Verdict("Tool errors in right answers", state, shown, rule, source, worst)


def entropy(window: Window) -> Verdict:
    """Too little and it explores no more; much more than at first and it falls apart."""
    now, first = window.mean("entropy"), window.first("entropy")
    rule = f"above {ENTROPY_LOW:g} nats per token, below {ENTROPY_GROWTH:g} times the stage's first {WINDOW} steps"
    source = "that it collapses: arXiv:2503.14476 section 3.1; the numbers are chosen here"
    if now is None:
        return Verdict("Entropy", State.UNKNOWN, "no update in these steps", rule, source)
    state = State.BAD if now < ENTROPY_COLLAPSED else State.LOOK if now < ENTROPY_LOW else State.WELL
    if first and now > ENTROPY_GROWTH * first:
        state = State.BAD
    return Verdict("Entropy", state, f"{now:.3f} nats, at first {first or 0:.3f}", rule, source)


def logprob_diff(window: Window) -> Verdict:
    """Do the engine that samples and the learner that trains compute the same thing?"""
    now = window.mean("logprob_diff_mean")
    types = {str(value) for name in ("engine.dtype", "learner.dtype") for value in window.run.setting(name)}
    kind = "float32" if types == {"float32"} else "bfloat16"
    usual = LOGPROB_DIFF[kind]
    rule = f"mean below {usual:g} nats per token in {kind}"
    source = "README and docs/gpu.md: what agrees, agrees so far"
    if now is None:
        return Verdict("Engine against learner", State.UNKNOWN, "no update in these steps", rule, source)
    shown = f"{now:.1e}, most {max(row['logprob_diff_max'] or 0 for row in window.late):.1e}"
    worst = window.worst("logprob_diff_mean")
    return Verdict("Engine against learner", _graded(now, usual, LOGPROB_BAD * usual), shown, rule, source, worst)


def gradient(window: Window) -> Verdict | None:
    known = sorted(row["grad_norm"] for row in window.stage if row["grad_norm"] is not None)
    late = [row["grad_norm"] for row in window.late if row["grad_norm"] is not None]
    if not late:
        return None
    median = known[len(known) // 2]
    rule = f"below {GRADIENT_SPIKE:g} times the stage's median"
    shown = f"most {max(late):.2f}, median of the stage {median:.2f}"
    state = State.LOOK if max(late) > GRADIENT_SPIKE * median else State.WELL
    return Verdict("Gradient norm", state, shown, rule, CHOSEN, window.worst("grad_norm"))


def truncation(window: Window) -> Verdict:
    now, first = window.mean("share_truncated") or 0.0, window.first("share_truncated") or 0.0
    most = TRUNCATED + NEAR
    rule = f"at most {percent(most, 0)} of the rollouts: where it settles above, answers need a larger budget"
    state = _graded(now, most, 2 * most)
    shown = f"{percent(now)}, at first {percent(first)}"
    return Verdict("Cut off by the budget", state, shown, rule, PAPER, window.worst("share_truncated"))


def empty_groups(window: Window) -> Verdict:
    """Prompts whose kept siblings all have the same reward teach nothing."""
    kept, equal = (sum(row[name] for row in window.late) for name in ("groups_kept", "groups_equal_dropped"))
    share = equal / (kept + equal) if kept + equal else 1.0
    nothing = sum(not row["groups_kept"] for row in window.late)
    rule = f"below {percent(EMPTY_GROUPS, 0)} of the prompts, and no step without any"
    state = State.BAD if nothing else _graded(share, EMPTY_GROUPS, EMPTY_GROUPS_BAD)
    most = next(iter(window.run.setting("max_empty_steps")), None)
    source = CHOSEN if most is None else f"{CHOSEN}; --max-empty-steps {most} ends the run"
    shown = f"{percent(share, 0)} of the prompts, {nothing} steps without signal"
    return Verdict("Groups without signal", state, shown, rule, source, window.worst("groups_equal_dropped"))


def solved(window: Window) -> Verdict:
    now = window.mean("share_all_right") or 0.0
    rule = f"at most {percent(ALL_RIGHT, 0)} of the prompts all right: beyond, the stage has taught what it can"
    state = State.LOOK if now > ALL_RIGHT else State.WELL
    return Verdict("Prompts all right", state, percent(now, 0), rule, PAPER)


def kv_use(window: Window) -> Verdict | None:
    placed = window.placed()
    if not placed:
        return None
    used, waiting = (
        sum(row["kv_used_share"] for row in placed) / len(placed),
        max(row["waiting_most"] for row in placed),
    )
    rule = f"above {percent(KV_IDLE, 0)} where rollouts wait for a place"
    state = State.LOOK if waiting and used < KV_IDLE else State.WELL
    reserved = sum(row["kv_reserved_share"] for row in placed) / len(placed)
    shown = f"{percent(used, 0)} in use, {percent(reserved, 0)} reserved, most waiting {waiting:,}"
    return Verdict("KV cache", state, shown, rule, CHOSEN)


def preemptions(window: Window) -> Verdict | None:
    placed = window.placed()
    if not placed:
        return None
    again, sampled = sum(row["recomputed_tokens"] for row in placed), sum(r["tokens_generated"] for r in window.late)
    share = again / sampled if sampled else 0.0
    count, moves = sum(row["preemptions"] for row in placed), sum(row["moves"] for row in placed)
    rule = f"tokens computed again at most {percent(RECOMPUTED, 0)} of those sampled"
    shown = f"{count:,} preemptions, {moves:,} moves, {percent(share)} computed again"
    return Verdict("Preemptions", _graded(share, RECOMPUTED, RECOMPUTED_BAD), shown, rule, CHOSEN)


def memory(window: Window) -> Verdict | None:
    """What grows from step to step ends the run some night. The first steps, in which all is set up, do not count."""
    warm = [row["memory_bytes"] for row in window.stage[WINDOW : 2 * WINDOW] if row["memory_bytes"]]
    late = [row["memory_bytes"] for row in window.late if row["memory_bytes"]]
    if not late:
        return None
    held = {kind: sum(row.get(kind, 0) for row in late) / len(late) for kind in late[-1]}
    shown = f"{sum(held.values()) / 2**30:.1f} GiB in all"
    rule = f"no kind of process grows by {percent(MEMORY_GROWTH, 0)} over the stage, once it is warm"
    if len(window.stage) < 3 * WINDOW or not warm:
        return Verdict("Memory", State.UNKNOWN, f"{shown}; growth is told from step {3 * WINDOW} on", rule, CHOSEN)
    before = {kind: sum(row.get(kind, 0) for row in warm) / len(warm) for kind in held}
    grown = {
        kind: held[kind] / before[kind] - 1
        for kind in held
        if before[kind] and held[kind] - before[kind] >= LEAST_MEMORY_GROWTH
    }
    most = max(grown, key=lambda kind: grown[kind], default="")
    state = _graded(grown[most], MEMORY_GROWTH, MEMORY_GROWTH_BAD) if most else State.WELL
    told = f"{most} +{percent(grown[most], 0)} to {held[most] / 2**30:.1f} GiB" if most else "none grows"
    return Verdict("Memory", state, f"{shown}; {told}", rule, CHOSEN)


def retries(window: Window) -> Verdict:
    rollouts = sum(row["rollouts"] for row in window.late) or 1
    restarts, judged = (sum(row[name] for row in window.late) for name in ("restarts", "judge_retries"))
    rule = f"at most {percent(RETRIED)} of the rollouts"
    state = _graded((restarts + judged) / rollouts, RETRIED, RETRIED_BAD)
    shown = f"{restarts:,} begun again, {judged:,} judged again, of {rollouts:,}"
    return Verdict("Retries", state, shown, rule, CHOSEN, window.worst("restarts") if restarts else None)


def dropped(window: Window) -> Verdict | None:
    """Those that our own failures ended: the step asked for more than it got."""
    per_prompt, prompts = window.run.rollouts_drawn(), window.run.setting("prompts_per_step")
    if len(per_prompt) != 1 or len(prompts) != 1:
        return None
    asked = per_prompt[0] * prompts[0] * len(window.late)
    lost = max(0, asked - sum(row["rollouts"] for row in window.late))
    state = State.BAD if lost > DROPPED_BAD * asked else State.LOOK if lost else State.WELL
    rule = f"none; at most {percent(DROPPED_BAD, 0)}"
    return Verdict(
        "Dropped rollouts", state, f"{lost:,} of {asked:,}", rule, f"{CHOSEN}; at half of a step the run ends"
    )


def books(window: Window) -> Verdict | None:
    placed = window.placed()
    if not placed:
        return None
    faults = [fault for row in placed for fault in row["faults"]]
    aside = sorted({text for row in placed for text in row["set_aside"]})
    state = State.BAD if faults else State.LOOK if aside else State.WELL
    said = [f"{len(faults)} steps whose books do not close"] * bool(faults) + [f"set aside: {text}" for text in aside]
    rule = "the balancer's books close, no replica is set aside"
    return Verdict("Balancer", state, "; ".join(said) or "in order", rule, "an invariant")
