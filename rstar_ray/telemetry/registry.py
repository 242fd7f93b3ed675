"""Every metric of a run, one entry each: name, unit, meaning, kind, and reduction of several values.

Step metrics describe one training step. They are passed as `dict[str, float]` keyed by `Metric.name`, and loops over
this table write them to `metrics.jsonl`, the console line, TensorBoard, Weights & Biases, Prometheus and the report. To
add a metric, put its value into the dict where it is computed and add its entry here.

Process metrics describe a process while it runs. The process sets them itself (`Meter`), for Prometheus only.

In Prometheus a metric is called `rstar_<name>`, with `_` for `/` and the suffix `_total` for a counter; Ray adds the
prefix `ray_`. Every metric has the label `run`, the name of the run directory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Metric type in Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


class Reduction(StrEnum):
    """How the values of several micro batches, updates or steps are combined.

    The loss returns sums over tokens for a metric with `MEAN`; the learner divides them by the number of tokens.
    """

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. A step metric with a second label has one key per value of it: `memory_bytes/driver`."""

    name: str
    group: str
    help: str
    unit: str = ""
    kind: Kind = Kind.GAUGE
    reduction: Reduction = Reduction.LAST
    labels: tuple[str, ...] = ()  # in addition to `run`
    boundaries: tuple[float, ...] = ()  # of a histogram's buckets
    console: str = ""  # format in the console line; empty: not shown

    @property
    def exported_name(self) -> str:
        """Its name in Prometheus, without Ray's prefix."""
        return f"rstar_{self.name.replace('/', '_')}{'_total' if self.kind is Kind.COUNTER else ''}"


def _step(
    name: str,
    reduction: Reduction,
    help: str,
    *,
    group: str,
    unit: str = "",
    kind: Kind = Kind.GAUGE,
    label: str = "",
    console: str = "",
) -> Metric:
    return Metric(
        name=name,
        group=group,
        help=help,
        unit=unit,
        kind=kind,
        reduction=reduction,
        labels=("stage", label) if label else ("stage",),
        console=console,
    )


def _rollouts(name: str, reduction: Reduction, help: str, unit: str = "", console: str = "") -> Metric:
    return _step(name, reduction, help, group="rollouts", unit=unit, console=console)


def _by(name: str, label: str, help: str, unit: str = "") -> Metric:
    return _step(name, Reduction.MEAN, help, group="rollouts", unit=unit, label=label)


def _counted(name: str, help: str, unit: str = "", group: str = "rollouts") -> Metric:
    return _step(name, Reduction.SUM, help, group=group, unit=unit, kind=Kind.COUNTER)


def _seconds(name: str, help: str, group: str = "time", console: str = "") -> Metric:
    return _step(name, Reduction.SUM, help, group=group, unit="s", console=console)


def _update(name: str, reduction: Reduction, help: str, unit: str = "", console: str = "") -> Metric:
    return _step(name, reduction, help, group="update", unit=unit, console=console)


def _balancer(name: str, reduction: Reduction, help: str, unit: str = "") -> Metric:
    return _step(f"balancer/{name}", reduction, help, group="balancer", unit=unit)


MEAN, SUM, MAX, MIN, LAST = Reduction

STEP_METRICS: tuple[Metric, ...] = (
    # -- rollouts of the step, before resampling
    _rollouts("reward_mean", MEAN, "mean reward", console="reward {:.3f}"),
    _rollouts("pass_rate", MEAN, "rollouts with a reward of 1 or more", "fraction", "pass {:.0%}"),
    _rollouts("frac_all_correct", MEAN, "groups whose rollouts are all correct", "fraction", "all correct {:.0%}"),
    _rollouts("frac_all_wrong", MEAN, "groups without a correct rollout", "fraction", "all wrong {:.0%}"),
    _rollouts("frac_groups_dropped", MEAN, "groups without signal: kept rewards are equal", "fraction"),
    _rollouts("groups_kept", SUM, "groups trained on"),
    _rollouts("groups_dropped", SUM, "groups without signal"),
    _rollouts(
        "tool_error_rate_correct",
        MEAN,
        "failed tool calls of all calls in correct rollouts (arXiv:2508.20722 Fig. 4)",
        "fraction",
        "tool errors {:.1%}",
    ),
    _rollouts("calls_in_correct", SUM, "tool calls in correct rollouts"),
    _rollouts("response_tokens_mean", MEAN, "tokens after the prompt, per rollout", "tokens", "{:,.0f} tokens"),
    _rollouts("frac_truncated", MEAN, "rollouts truncated by a token budget", "fraction", "truncated {:.1%}"),
    _rollouts(
        "frac_max_turns",
        MEAN,
        "rollouts ended by --rollout.max-turns or --tools.max-environment-turns",
        "fraction",
        "turn limit {:.1%}",
    ),
    _rollouts("turns_mean", MEAN, "completions per rollout"),
    _rollouts("calls_mean", MEAN, "tool calls per rollout"),
    _by("tool_calls", "tool", "calls of a tool per rollout"),
    _by("tool_error_rate", "tool", "failed calls of a tool", unit="fraction"),
    _by("reward_component", "component", "component of the reward, as the reward function returned it"),
    _rollouts("rollouts", SUM, "rollouts that finished"),
    _rollouts("trained_trajectories", SUM, "trajectories in the update"),
    _counted("tokens_generated", "tokens sampled by the policy, without tool results", "tokens"),
    _rollouts(
        "tokens_per_s",
        MEAN,
        "tokens per second; RL: sampled, over rollout_s, with --staleness over step_s + inter_step_s; SFT: trained on",
        "tokens/s",
        "{:,.0f} tok/s",
    ),
    _counted("new_lines", "lines of tokens that agents began in addition to the first of a rollout (docs/agents.md)"),
    _counted("restarts", "rollouts started again because a tool had lost its state"),
    _counted("judge_retries", "reward computations that hung or crashed and were retried"),
    _rollouts(
        "policy_version",
        LAST,
        "version of the weights published after the step: training steps that changed the policy",
    ),
    _rollouts("policy_version_min", MIN, "oldest weights that sampled a token of the step"),
    _rollouts("policy_version_max", MAX, "newest weights that sampled a token of the step"),
    _rollouts(
        "token_age_mean",
        MEAN,
        "training steps by which the weights that sampled a trained token are behind the learner's",
    ),
    _rollouts("token_age_max", MAX, "the same, largest; at most --staleness"),
    _by("token_age_frac", "age", "trained tokens by age", unit="fraction"),
    # -- wall time of the step; the rollout phase is rollout_s, which generate, tools and verify divide
    _seconds("step_s", "whole step"),
    _seconds("rollout_s", "time that the step waited for its rollouts"),
    _seconds("generate_s", "part of the rollout phase in which engines sampled", console="generate {:.1f} s"),
    _seconds("tools_s", "part of the rollout phase in tool calls", console="tools {:.1f} s"),
    _seconds("verify_s", "part of the rollout phase in which rewards were computed", console="verify {:.1f} s"),
    _seconds("learn_s", "update of the policy", console="learn {:.1f} s"),
    _seconds("publish_s", "transfer of the new weights to the engines", console="publish {:.1f} s"),
    _seconds("other_s", "rest of the step, in the driver"),
    _seconds("inter_step_s", "between the previous step and this one: records, checkpoint, evaluation"),
    # -- the update of the policy; means are over trained tokens of all ranks
    _update("loss", MEAN, "loss; of SFT in nats per trained token", console="loss {:.4f}"),
    _update("val_loss", LAST, "loss on held-back conversations (SFT)", "nats", "val loss {:.4f}"),
    _update("grad_norm", MEAN, "gradient norm over all weights, before clipping"),
    _update("entropy", MEAN, "entropy of the policy's next token", "nats"),
    _update("clip_frac", MEAN, "tokens whose objective the loss clips or masks", "fraction"),
    _update("clip_frac_positive", MEAN, "clipped tokens with a positive advantage, of all tokens", "fraction"),
    _update("clip_frac_negative", MEAN, "clipped tokens with a negative advantage or 0, of all tokens", "fraction"),
    _update("logprob_diff_mean", MEAN, "|old_logprobs - rollout_logprobs|: learner against engine", "nats"),
    _update("logprob_diff_max", MAX, "the same, largest", "nats"),
    _update("kl_sampler", MEAN, "k3 estimate of KL(sampler || policy before the update)", "nats"),
    _update("ess_tokens", MEAN, "effective sample size of the tokens' importance weights, of all tokens", "fraction"),
    _update("ess_rows", MEAN, "the same of the rows' weights, each the product over its tokens", "fraction"),
    _update("ratio_mean", MEAN, "ratio to the loss's old policy"),
    _update("ratio_max", MAX, "the same, largest"),
    _update("kl", MEAN, "k3 estimate of the KL divergence to the reference policy", "nats"),
    _update("correction_mean", MEAN, "importance weight for the gap between engine and learner"),
    _update("old_logprobs_drift", MAX, "largest gap to old log-probs computed by a separate pass, if checked", "nats"),
    _update("lr", LAST, "learning rate", console="lr {:.1e}"),
    # -- the learner's work
    _counted("trained_tokens", "tokens with a loss", "tokens", "learner"),
    _counted("input_tokens", "tokens through the model, without padding", "tokens", "learner"),
    _step("padding_frac", MEAN, "padding in the model's input", group="learner", unit="fraction"),
    _seconds("update_s", "optimizer steps, without the transfer of the rows", "learner"),
    _counted("updates_refused", "updates not applied because loss or gradient was not finite", group="learner"),
    # -- the transfer of the weights; the slowest replica counts
    _seconds("publish/gather_s", "ranks gather the weights", "publish"),
    _seconds("publish/move_s", "weights into the shared memory of the engine's node", "publish"),
    _seconds("publish/load_s", "engine paused to load them", "publish"),
    _step("publish/num_bytes", LAST, "size of the weights", group="publish", unit="bytes"),
    _step("publish/copies", LAST, "copies in shared memory, one per node", group="publish"),
    # -- placement of the rollouts; utilisation is of all replicas' KV caches together
    _balancer("queue_len_max", MAX, "largest number of rollouts waiting for a replica"),
    _balancer("in_flight_max", MAX, "largest number of rollouts on replicas"),
    _balancer("kv_util_mean", MEAN, "KV cache in use", "fraction"),
    _balancer("kv_util_max", MAX, "KV cache in use, largest", "fraction"),
    _balancer("kv_reserved_mean", MEAN, "KV cache reserved for the expected need of its rollouts", "fraction"),
    _balancer("kv_reserved_max", MAX, "the same, largest", "fraction"),
    _balancer("num_preemptions", SUM, "sequences evicted from the KV cache"),
    _balancer("num_moves", SUM, "rollouts moved to another replica"),
    _balancer("num_recomputed_tokens", SUM, "tokens computed again after preemptions and moves", "tokens"),
    _balancer("wait_p50_s", MEAN, "seconds in the queue, median", "s"),
    _balancer("wait_p99_s", MAX, "seconds in the queue, 99th percentile", "s"),
    _balancer("preemption_risk", LAST, "share of rollouts that the rule allows to be preempted", "fraction"),
    _step("memory_bytes", LAST, "memory of processes by type", group="memory", unit="bytes", label="type"),
)
"""Step metrics, in the order in which they are written and shown."""


def _gauges(group: str, labels: tuple[str, ...], unit: str = "", **helps: str) -> list[Metric]:
    return [Metric(name=name, group=group, help=help, unit=unit, labels=labels) for name, help in helps.items()]


def _counters(group: str, labels: tuple[str, ...], unit: str = "", **helps: str) -> list[Metric]:
    return [
        Metric(name=name, group=group, help=help, unit=unit, kind=Kind.COUNTER, labels=labels)
        for name, help in helps.items()
    ]


def _histogram(group: str, name: str, unit: str, help: str, boundaries: tuple[float, ...], *labels: str) -> Metric:
    return Metric(
        name=name, group=group, help=help, unit=unit, kind=Kind.HISTOGRAM, labels=labels, boundaries=boundaries
    )


SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0)
TOKENS = (64.0, 128.0, 256.0, 512.0, 1_024.0, 2_048.0, 4_096.0, 8_192.0, 16_384.0, 32_768.0)

PROCESS_METRICS: tuple[Metric, ...] = (
    # -- the driver
    *_gauges("driver", ("stage",), step="newest step of the stage that has ended"),
    *_gauges("driver", ("stage",), "s since 1970", step_end_timestamp_seconds="when it ended"),
    *_gauges("driver", ("stage",), run_active="1 while the stage runs, 0 after it has ended normally"),
    *_gauges(
        "driver",
        ("stage",),
        "s",
        checkpoint_seconds="newest checkpoint, from its copy until it is complete on disk",
        checkpoint_blocking_seconds="part of it in which no step could start",
    ),
    *_gauges("driver", ("stage", "set"), "fraction", evaluation_pass_ratio="pass@1 of the newest evaluation"),
    *_counters("driver", ("stage",), steps="steps that have ended"),
    *_gauges(
        "driver",
        (),
        "bytes",
        disk_free_bytes="free on the file system of the run directory",
        disk_size_bytes="size of that file system",
    ),
    *_counters(
        "driver",
        ("stage", "status"),
        ledger_rollouts="rollouts by status: trained, resampled_away, in_equal_groups, left_out, dropped, abandoned",
    ),
    # -- replicas, each by its own worker
    *_gauges(
        "engines",
        ("replica",),
        "tokens",
        engine_kv_used_tokens="KV cache in use",
        engine_kv_capacity_tokens="size of the KV cache",
    ),
    *_gauges(
        "engines",
        ("replica",),
        engine_running="sequences being decoded",
        engine_waiting="requests waiting for KV cache",
        engine_policy_version="version of the weights that it serves",
        engine_rollouts_at_tools="rollouts there that wait for a tool",
    ),
    *_counters(
        "engines",
        ("replica",),
        engine_steps="decode steps",
        engine_preemptions="sequences evicted from the KV cache",
    ),
    _histogram("engines", "completion_seconds", "s", "one completion, with its wait in the engine", SECONDS, "replica"),
    _histogram("engines", "tool_call_seconds", "s", "one tool call, from issue to result", SECONDS, "replica"),
    _histogram("engines", "rollout_response_tokens", "tokens", "response of a finished rollout", TOKENS, "replica"),
    *_counters("engines", ("replica", "reason"), rollouts_ended="rollouts that ended, by stop reason; failed: dropped"),
    *_counters("engines", ("replica", "outcome"), tool_calls="tool calls of rollouts that ended, by outcome"),
    # -- the balancer
    *_gauges(
        "balancer",
        (),
        balancer_waiting="rollouts waiting for a replica",
        balancer_in_flight="rollouts on a replica",
        balancer_replicas="registered replicas",
        balancer_replicas_quarantined="replicas that receive no new rollouts because they reported invalid numbers",
    ),
    *_gauges(
        "balancer",
        (),
        "fraction",
        balancer_kv_used_ratio="KV cache in use, of all replicas together",
        balancer_kv_reserved_ratio="KV cache reserved for the expected need of its rollouts",
    ),
    *_counters(
        "balancer",
        (),
        balancer_moves="rollouts moved to another replica",
        balancer_preemptions="preemptions that replicas reported",
    ),
    *_counters(
        "balancer", (), "tokens", balancer_recomputed_tokens="tokens computed again after moves and preemptions"
    ),
    _histogram("balancer", "balancer_wait_seconds", "s", "time in the balancer's queue, for each placement", SECONDS),
    # -- sandboxes
    *_counters("sandbox", ("executor", "outcome"), sandbox_calls="programs that ended, by outcome"),
    *_counters(
        "sandbox",
        ("executor",),
        sandbox_accepted="calls accepted",
        sandbox_refused="calls refused because the queue was full",
        sandbox_failed="calls that ended in an infrastructure error",
        sandbox_retried="programs retried in another worker",
        sandbox_workers_replaced="workers replaced by age or clean-up",
        sandbox_workers_lost="workers that died or stopped answering",
        sandbox_servers_lost="warm servers that died or stopped answering",
    ),
    *_counters(
        "sandbox",
        ("executor",),
        "s",
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
    ),
    *_gauges("sandbox", ("executor",), "bytes", sandbox_servers_memory_bytes="peak resident memory of warm servers"),
    # -- processes of the run
    *_gauges(
        "processes", ("rank", "of"), "bytes", learner_memory_bytes="memory of a rank: host, or device at its peak"
    ),
    *_gauges("processes", ("process",), "bytes", process_memory_bytes="memory of a process and its children"),
    *_gauges("processes", ("process",), "s", detector_silence_seconds="time since a process answered last"),
    *_gauges("processes", (), detector_processes="processes that are probed"),
    *_gauges("processes", (), "s", detector_oldest_wait_seconds="longest wait of the driver for another process"),
    *_counters("processes", (), detector_killed="processes killed because they were silent or stuck"),
    *_counters("processes", ("part",), losses="processes lost, by part: replica or learner"),
)

METRICS = (*STEP_METRICS, *PROCESS_METRICS)
BY_EXPORTED_NAME = {metric.exported_name: metric for metric in METRICS}
_STEP_BY_NAME = {metric.name: metric for metric in STEP_METRICS}


def step_metric(key: str) -> tuple[Metric, dict[str, str]]:
    """The entry of a step's key, and its labels except `run` and `stage`. Raises `ValueError` for an unknown key."""
    if (metric := _STEP_BY_NAME.get(key)) is not None and len(metric.labels) == 1:
        return metric, {}
    name, _, value = key.partition("/")
    metric = _STEP_BY_NAME.get(name)
    if metric is None or len(metric.labels) != 2 or not value:
        raise ValueError(f"unknown metric {key!r}. Hint: add it to rstar_ray/telemetry/registry.py")
    return metric, {metric.labels[1]: value}


def is_step_metric(key: str) -> bool:
    return key in _STEP_BY_NAME or key.partition("/")[0] in _STEP_BY_NAME


def combined(rows: Sequence[Mapping[str, float]], *, weights: Sequence[float] | None = None) -> dict[str, float]:
    """Combine several rows of step metrics, each metric by its reduction. Means are weighted by `weights`, if given.

    >>> combined([{"loss": 1.0, "ratio_max": 2.0, "lr": 3e-6}, {"loss": 2.0, "ratio_max": 1.5, "lr": 2e-6}])
    {'loss': 1.5, 'ratio_max': 2.0, 'lr': 2e-06}
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    known = {key: [(row[key], at) for at, row in enumerate(rows) if key in row] for key in keys}
    return {
        key: _reduced(
            step_metric(key)[0].reduction,
            [value for value, _ in pairs],
            [1.0 if weights is None else weights[at] for _, at in pairs],
        )
        for key, pairs in known.items()
    }


def _reduced(reduction: Reduction, values: Sequence[float], weights: Iterable[float]) -> float:
    match reduction:
        case Reduction.MEAN:
            weights = list(weights)
            total = sum(value * weight for value, weight in zip(values, weights, strict=True))
            return total / (sum(weights) or 1.0)
        case Reduction.SUM:
            return sum(values)
        case Reduction.MAX:
            return max(values)
        case Reduction.MIN:
            return min(values)
        case Reduction.LAST:
            return values[-1]
