"""One rank of the learner: a DeepSpeed engine around a Hugging Face causal LM. No Ray here.

Every public method but the constructor and `close` is a collective: all ranks call it with work of the same shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from actors.launch.changed_settings import rule_digests
from actors.learner import attention_kernels, checkpoint, deepspeed_start, model_files
from actors.learner.adapters import add_adapters
from actors.learner.file_writer import FileWriter
from actors.learner.losses import PolicyLoss, SftLoss, seen_by_row
from actors.learner.optimizer_step import MicroBatches, OptimizerSteps, as_one
from actors.learner.policy import Policy, RankFacts, load_language_model, rank_facts, refuse_changed_logits, use_liger
from actors.weights.tensors import ServedWeights
from rstar_ray.algorithm.batch import MicroBatch, TokenRow, collate
from rstar_ray.algorithm.off_policy import effective_sample_size, weight_moments
from rstar_ray.algorithm.update import SeenTokens, UpdateResult
from rstar_ray.config import RunConfig
from rstar_ray.run_dir.manifest import WrittenFile

if TYPE_CHECKING:
    from actors.learner.state import LearnerState


class LearnerRank:
    """Trains one policy together with the other ranks; see `actors.learner.learner_actor` for its Ray shell."""

    policy: Policy
    reference: Policy | None  # of --algorithm.reference-model, whole on every rank in the forward pass's type
    state: "LearnerState"

    def __init__(self, config: RunConfig, model: Path, rank: int = 0) -> None:
        """Trains the policy in the folder `model`."""
        self.config = config
        self._model = model
        self.rank = rank
        self.calls = 0  # of train_rl
        self._seen: list[tuple[Sequence[TokenRow], tuple[Tensor, Tensor]]] = []  # micro batches of the newest
        self._base = str(model)  # folder of the weights that adapters are trained beside; empty if unknown
        self._store: Any = None  # held by the rank that the others meet at
        self._files = FileWriter(by=f"learner/rank-{rank}")

    # ------------------------------------------------------------ start and end

    def open_store(self, host: str) -> int:
        """Listen for the other ranks; returns the port."""
        self._store = deepspeed_start.open_store(self.config.learner, host)
        return self._store.port

    def start(self, master_address: str = "", master_port: int = 0) -> None:
        """Join the other ranks and load the model. A single rank needs no address.

        Raises `ConfigError` for a model that the learner cannot train or engines could not serve.
        """
        config, learner = self.config, self.config.learner
        torch.set_num_threads(learner.num_threads)
        self.device = deepspeed_start.learner_device(learner)
        meeting = self._store or (master_address, master_port)
        deepspeed_start.join_ranks(learner, self.rank, self.device, meeting)
        deepspeed_start.seed_generators(config.seed + self.rank)
        if config.deterministic:
            deepspeed_start.compute_deterministically()
        attention_kernels.choose(self.device)
        policy = self._load(self._model, trained=True)
        attention_kernels.refuse_unfit(learner, policy.language_model.config, self.device)
        self._start_engine(policy)
        self.reference = None
        if config.algorithm.reference_model:
            reference = self._load(Path(config.algorithm.reference_model))
            self.reference = reference.to(self.device).requires_grad_(False).eval()
        refuse_changed_logits(self.policy, self.engine, self.device, learner)

    def _load(self, folder: Path, *, trained: bool = False) -> Policy:
        learner = self.config.learner
        language_model = load_language_model(folder, learner)
        if trained and learner.liger:
            use_liger(language_model)
        if trained and learner.lora_rank:
            add_adapters(language_model, learner)
        return Policy(language_model, learner.logprob_chunk_tokens, float32_head=self.config.float32_head)

    def _start_engine(self, policy: Policy) -> None:
        learner = self.config.learner
        if learner.activation_checkpointing:
            options = {"use_reentrant": False}
            policy.language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        self.policy = policy.to(self.device)
        self.engine, optimizer = deepspeed_start.start_deepspeed(policy, learner, self.config.optimizer)
        from actors.learner.state import LearnerState

        self.optimizer = optimizer
        self.state = LearnerState(self.engine, policy.language_model, optimizer, learner.zero)
        self._steps = OptimizerSteps(self.config, self.rank, self.engine, optimizer)
        self.engine.train()

    @property
    def step(self) -> int:
        """Optimizer steps applied."""
        return self._steps.step

    def facts(self) -> RankFacts:
        """What the front plans with."""
        num_parameters = sum(torch.Size(shape).numel() for shape in self.state.shapes.values())
        return replace(rank_facts(self.policy, num_parameters), own_rules=rule_digests(self.config))

    def memory_bytes(self) -> dict[str, int]:
        """Of this process on the host, and the most that it has held on its device; safe from any thread."""
        held = {"host": psutil.Process().memory_info().rss}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            held["device"] = torch.cuda.max_memory_allocated()
        return held

    def release(self) -> None:
        """Release the model and the optimizer; the rank cannot be used after it."""
        self.engine.destroy()
        del self.engine, self.policy, self.optimizer, self.state, self.reference, self._steps

    def close(self) -> None:
        """Write to its end what is being written, and leave the group: no learning after it."""
        self._files.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ------------------------------------------------------------ training

    def train_rl(self, updates: Sequence[MicroBatches], lr: float) -> UpdateResult:
        """One optimizer step for each of `updates`, whose rows carry their token weights.

        With one update the ratio is taken to its own log-probs; with more, or where a check is due, a pass of their
        own computes the old log-probs of all of them first.
        """
        self.calls += 1
        every = self.config.learner.check_old_logprobs_every
        checked = len(updates) == 1 and every > 0 and self.calls % every == 0
        prepared = [[self._collate(rows) for rows in update] for update in updates]
        old: Sequence[Sequence[Tensor] | None] = [None] * len(updates)
        if checked or len(updates) > 1:
            old = [[self._logprobs(batch, self.policy) for batch in batches] for batches in prepared]
        drift = 0.0
        results: list[UpdateResult] = []
        self._seen = []
        for update, batches, of_update in zip(updates, prepared, old, strict=True):
            loss = PolicyLoss(self.engine, self.config, old=of_update, reference=self._reference_logprobs())
            results.append(self._steps.take(update, batches, loss, lr))
            self._seen += zip(update, loss.seen, strict=True)
            drift = max(drift, loss.drift)
        result = as_one(results)
        metrics = {**result.metrics, **self._effective_sample_sizes(list(chain.from_iterable(prepared)))}
        if checked:
            metrics["old_logprobs_drift"] = self._all_max(drift)
        return replace(result, metrics=metrics)

    def _effective_sample_sizes(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Of the newest `train_rl`'s micro batches, over all ranks."""
        moments = torch.zeros(6, dtype=torch.float64, device=self.device)
        for batch, (_, (_, log_w_N)) in zip(batches, self._seen, strict=True):
            moments += weight_moments(log_w_N, batch.rows_N)
        dist.all_reduce(moments)
        of_tokens, of_rows = moments.tolist()[:3], moments.tolist()[3:]
        return {"ess_tokens": effective_sample_size(*of_tokens), "ess_rows": effective_sample_size(*of_rows)}

    def seen_tokens(self) -> dict[str, SeenTokens]:
        """Of the rows of the newest `train_rl`, by name; for records, so it is brought from the device when asked."""
        return {name: seen for rows, of_rows in self._seen for name, seen in seen_by_row(rows, of_rows)}

    def train_sft(self, micro_batches: MicroBatches, lr: float) -> UpdateResult:
        """One optimizer step of cross-entropy on rows that carry their token weights."""
        batches = [self._collate(rows) for rows in micro_batches]
        return self._steps.take(micro_batches, batches, SftLoss(self.engine), lr)

    def evaluate_sft(self, micro_batches: MicroBatches) -> float:
        """Cross-entropy over all ranks, each token by its row's weight; of the model's own distribution."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for rows in micro_batches:
            batch = self._collate(rows)
            total -= (batch.weights_N * self._logprobs(batch, self.policy, temperature=1.0)).double().sum()
        dist.all_reduce(total)
        return float(total)

    def logprobs(self, micro_batches: MicroBatches) -> list[Tensor]:
        """The log-probability of each row's sampled tokens at the rollouts' temperature, end to end, by micro batch."""
        return [self._logprobs(self._collate(rows), self.policy).cpu() for rows in micro_batches]

    def _collate(self, rows: Sequence[TokenRow]) -> MicroBatch:
        return collate(rows, packed=self.config.learner.packed).to(self.device)

    def _logprobs(self, batch: MicroBatch, policy: Policy, temperature: float | None = None) -> Tensor:
        temperature = self.config.rollout.policy_temperature if temperature is None else temperature
        self.engine.eval()
        with torch.no_grad():
            logprobs_N, _ = policy(batch, temperature)
        self.engine.train()
        return logprobs_N

    def _reference_logprobs(self) -> Callable[[MicroBatch], Tensor] | None:
        reference = self.reference
        return None if reference is None else lambda batch: self._logprobs(batch, reference)

    def _all_max(self, value: float) -> float:
        whole = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(whole, dist.ReduceOp.MAX)
        return float(whole)

    # ------------------------------------------------------------ weights out and in

    def served_weights(self) -> ServedWeights:
        """What an engine needs to serve the policy."""
        return ServedWeights(
            self.state.served_entries,
            self.state.served,
            self.config.learner.bucket_bytes,
            everywhere=self.config.weight_way == "ipc",
        )

    def export(self, folder: Path) -> None:
        """An ordinary Hugging Face folder that transformers and vLLM load; it is there once `written` returns.

        Under adapters `adapter` beside it is a PEFT folder.
        """
        learner = self.config.learner
        write = model_files.export(folder, self.policy, self.state, learner, source=self._model, base=self._base)
        if write is not None:
            self._files.hand(write)

    def set_policy(self, folder: Path) -> None:
        """Take over the weights of a Hugging Face folder of the same architecture; the optimizer stays."""
        model_files.take_over(folder, self.policy, self.state)
        if self.state.base_replaced:
            self._base = str(folder)

    def reset_optimizer(self) -> None:
        """Forget the moments and the steps; the policy stays."""
        self.state.clear_moments()
        self._steps.step = 0

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        """All that a learner needs to resume, and what the caller adds, as it is now; it is there once `written`
        returns, on every rank."""
        position = checkpoint.Position(
            step=self.step, calls=self.calls, bad_updates=self._steps.bad_updates, extra=extra, base=self._base
        )
        taken = checkpoint.snapshot(self.state, position, architecture=self.policy.architecture)
        self._files.hand(lambda: taken.write(folder))

    def written(self) -> dict[Path, WrittenFile]:
        """What this rank wrote since it was asked last; waits, and may be asked from any thread.

        Raises what kept a file from being written.
        """
        return self._files.written()

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Resume from a checkpoint of any number of ranks; returns its `extra`."""
        position = checkpoint.load(folder, self.state, architecture=self.policy.architecture)
        self._steps.step = position.step
        # Updates that stopped the run count no longer: it takes as many again to stop it.
        stopped = position.bad_updates >= self.config.optimizer.max_bad_updates
        self._steps.bad_updates = 0 if stopped else position.bad_updates
        self.calls = position.calls
        if self.state.base_replaced:
            self._base = position.base
        self.optimizer.set_steps(position.step)
        return position.extra
