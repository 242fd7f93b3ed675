"""Every metric that a run exports: name, kind, meaning, labels. Dashboards, alerts and docs/metrics.md are held to it.

A name ends in its unit (`_seconds`, `_bytes`, `_tokens`, `_ratio` from 0 to 1, `_nats`), a counter's in `_total` after
it; what counts things, or has no unit, is named by the things. Every metric has the label `run`, the run directory's
name; Ray puts `ray_` before the name.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What Prometheus calls it."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


UNITS = {
    "tokens_per_second": "tokens/s",
    "timestamp_seconds": "s since the epoch",
    "seconds": "s",
    "bytes": "bytes",
    "tokens": "tokens",
    "ratio": "share",
    "nats": "nats",
}
"""How a name ends, and what it then counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric; `labels` beside `run`."""

    name: str
    part: str  # whose it is: training, engines, balancer, ...
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()  # of a histogram's buckets

    @property
    def unit(self) -> str:
        """Empty for plain numbers."""
        stem = self.name.removesuffix("_total")
        return next((unit for suffix, unit in UNITS.items() if stem.endswith(f"_{suffix}")), "")


def _gauges(part: str, labels: tuple[str, ...], **meanings: str) -> list[Metric]:
    return [
        Metric(name=f"rstar_{name}", part=part, kind=Kind.GAUGE, meaning=meaning, labels=labels)
        for name, meaning in meanings.items()
    ]


def _counters(part: str, labels: tuple[str, ...], **meanings: str) -> list[Metric]:
    return [
        Metric(name=f"rstar_{name}_total", part=part, kind=Kind.COUNTER, meaning=meaning, labels=labels)
        for name, meaning in meanings.items()
    ]


def _histogram(part: str, name: str, meaning: str, boundaries: tuple[float, ...], *labels: str) -> Metric:
    return Metric(
        name=f"rstar_{name}",
        part=part,
        kind=Kind.HISTOGRAM,
        meaning=meaning,
        labels=labels,
        boundaries=boundaries,
    )


SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0)
TOKENS = (64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0, 8_192.0, 16_384.0, 32_768.0)

METRICS: tuple[Metric, ...] = (
    # -- the steps of a stage, set once a step by the driver
    *_gauges(
        "training",
        ("stage",),
        step="newest step of the stage that has ended",
        step_end_timestamp_seconds="when it ended",
        step_seconds="how long it took",
        reward_ratio="mean reward of its rollouts, before resampling",
        pass_ratio="rollouts with a reward of 1 or more",
        tool_error_correct_ratio="failed calls of all calls in correct answers",
        response_mean_tokens="tokens after the prompt, mean over rollouts",
        truncated_ratio="rollouts that a budget of tokens cut",
        max_turns_ratio="rollouts that a turn limit ended",
        turns_mean="completions of a rollout, mean",
        calls_mean="tool calls of a rollout, mean",
        groups_all_right_ratio="groups with nothing left to learn: every sibling right",
        groups_all_wrong_ratio="groups with every sibling wrong",
        groups_empty_ratio="groups that gave no signal, their kept rewards being equal",
        generation_tokens_per_second="tokens sampled per second of the rollout phase",
        loss="of the newest update; of SFT in nats per trained token",
        validation_loss_nats="of SFT, per token of held-back conversations",
        grad_norm="over all weights, before clipping",
        entropy_nats="of the policy's next token, mean",
        clip_ratio="trained tokens whose ratio was clipped",
        logprob_diff_mean_nats="difference of learner and engine in a sampled token's log-prob, mean",
        logprob_diff_max_nats="the same, largest",
        learning_rate="of the step's updates",
        policy_version="steps that made the weights which engines serve after it",
        checkpoint_seconds="how long the newest checkpoint took, from its copy until it was whole on disk",
        checkpoint_blocking_seconds="of it, how long no step could begin: the copy, and the wait for the one before",
        run_under_way="1 while the stage is under way, 0 once it has ended as it should",
    ),
    *_gauges(
        "training",
        ("stage", "phase"),
        phase_seconds="parts of the newest step: generate, tools, verify, learn, publish, and other, the driver's own",
    ),
    *_gauges(
        "training",
        ("stage", "set"),
        evaluation_pass_ratio="pass@1 of the newest evaluation on a problem set",
    ),
    *_counters(
        "training",
        ("stage",),
        steps="steps that ended",
        generated_tokens="tokens that the policy sampled",
        rollout_restarts="rollouts begun again because a tool had lost its state",
        judge_retries="judgements that hung or crashed on our side, and were asked again",
    ),
    *_gauges(
        "training",
        (),
        disk_free_bytes="on the file system of the run directory",
        disk_size_bytes="of that file system",
    ),
    # -- what became of rollouts
    *_counters(
        "ledger",
        ("stage", "fate"),
        ledger_rollouts="rollouts of steps by fate: trained, resampled_away, in_equal_groups, left_out, dropped",
    ),
    # -- replicas, each told by its own worker
    *_gauges(
        "engines",
        ("replica",),
        engine_kv_used_tokens="KV in use",
        engine_kv_capacity_tokens="KV there is",
        engine_running="sequences being decoded",
        engine_waiting="requests held back for want of room",
        engine_policy_version="weights that serve",
        engine_rollouts_at_tools="rollouts there that wait for a tool",
    ),
    *_counters(
        "engines",
        ("replica",),
        engine_steps="decode steps",
        engine_preemptions="sequences thrown out of the KV cache for want of room",
    ),
    _histogram("engines", "completion_seconds", "one completion, the engine's queue included", SECONDS, "replica"),
    _histogram("engines", "tool_call_seconds", "one tool call, from issue to result", SECONDS, "replica"),
    _histogram("engines", "rollout_response_tokens", "response of a rollout that ended", TOKENS, "replica"),
    *_counters(
        "engines",
        ("replica", "reason"),
        rollouts_ended="rollouts that ended, by stop reason; those that our failures ended: dropped",
    ),
    *_counters(
        "engines", ("replica", "outcome"), tool_calls="tool calls of rollouts that ended, by what became of them"
    ),
    # -- the balancer
    *_gauges(
        "balancer",
        (),
        balancer_waiting="rollouts that wait for a replica",
        balancer_in_flight="rollouts that are on one",
        balancer_kv_used_ratio="KV in use, of all replicas together",
        balancer_kv_reserved_ratio="KV that residents are counted on to need, now or later",
        balancer_replicas="replicas that are registered",
        balancer_replicas_set_aside="those of them that get no more work",
    ),
    *_counters(
        "balancer",
        (),
        balancer_moves="rollouts moved to another replica",
        balancer_preemptions="as replicas reported them",
        balancer_recomputed_tokens="contexts that had to be computed again, as far as can be told",
    ),
    _histogram("balancer", "balancer_wait_seconds", "from a rollout's submission to its grant", SECONDS),
    # -- sandboxes
    *_counters("sandbox", ("executor", "outcome"), sandbox_calls="programs that ended, by outcome"),
    *_counters(
        "sandbox",
        ("executor",),
        sandbox_accepted="calls taken in",
        sandbox_refused="calls refused for want of room",
        sandbox_failed="calls that ended in an error of ours",
        sandbox_retried="programs given to a second cell",
        sandbox_cells_replaced="cells replaced by age or clean-up",
        sandbox_cells_lost="cells that died or stopped answering",
        sandbox_servers_lost="warm servers that died or stopped answering",
        sandbox_waiting_seconds="time that calls waited for a slot",
        sandbox_running_seconds="time that programs ran",
        sandbox_timed_out_seconds="time of programs that timed out",
    ),
    *_gauges(
        "sandbox",
        ("executor",),
        sandbox_queue="calls waiting",
        sandbox_running="programs running",
        sandbox_slots="programs that may run at once",
        sandbox_servers_memory_bytes="peak resident memory of the warm servers",
    ),
    # -- the learner
    *_gauges(
        "learner",
        (),
        update_seconds="the newest optimizer step",
        update_tokens_per_second="tokens through the model in it, padding apart",
        update_padding_ratio="share of the model's input that was padding",
        published_bytes="weights of the newest version",
        publish_pack_seconds="how long the ranks took to gather them and lay them side by side",
        publish_move_seconds="how long the slowest replica took to bring them into its node's shared memory",
        publish_load_seconds="how long the slowest replica stood still to load them",
    ),
    *_counters("learner", (), trained_tokens="tokens trained on", updates_refused="updates that were not applied"),
    *_gauges("learner", ("rank", "of"), learner_memory_bytes="of a rank: host, its process; device, the most it held"),
    # -- the detector, and what was lost
    *_gauges(
        "detector",
        (),
        detector_processes="processes that are probed",
        detector_oldest_wait_seconds="the longest wait of the driver for another process",
    ),
    *_gauges(
        "detector",
        ("process",),
        detector_silence_seconds="since a process answered last",
        process_memory_bytes="of a process and its children, apart from what they share with others",
    ),
    *_counters("detector", (), detector_killed="processes killed because they were silent or stuck"),
    *_counters("detector", ("part",), losses="processes lost, by what they were: replica or learner"),
)
"""In the order of docs/metrics.md."""

BY_NAME = {metric.name: metric for metric in METRICS}
