"""One rank of the learner: a DeepSpeed engine around a Hugging Face causal LM; does not depend on Ray.

Every public method except the constructor and `close` is a collective: all ranks call it with work of the same shape.
"""

from collections.abc import Sequence
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
from actors.learner.losses import LogprobsFn, PolicyLoss, SftLoss, seen_by_row
from actors.learner.optimizer_step import MicroBatches, OptimizerSteps, as_one
from actors.learner.policy import Policy, RankFacts, load_language_model, rank_facts, refuse_changed_logits, use_liger
from actors.learner.served_reference import ServedReference
from actors.weights.tensors import ServedWeights
from rstar_ray.algorithm.batch import MicroBatch, TokenRow, collate
from rstar_ray.algorithm.off_policy import effective_sample_size, weight_moments
from rstar_ray.algorithm.rules import check_rules
from rstar_ray.algorithm.update import SeenTokens, UpdateResult
from rstar_ray.config import RunConfig
from rstar_ray.run_dir.manifest import WrittenFile

if TYPE_CHECKING:
    from actors.learner.state import LearnerState


class LearnerRank:
    """Trains one policy together with the other ranks; its Ray actor is `actors.learner.learner_actor`."""

    policy: Policy
    reference: Policy | ServedReference | None  # a policy is unsharded on every rank, in the forward dtype
    state: "LearnerState"

    def __init__(self, config: RunConfig, model: Path, rank: int = 0) -> None:
        """Trains the policy in the folder `model`."""
        self.config = config
        self._model = model
        self.rank = rank
        self.calls = 0  # of train_rl
        self._seen: list[tuple[Sequence[TokenRow], tuple[Tensor, Tensor]]] = []  # by micro batch, newest call
        self._base = str(model)  # folder of the base weights under LoRA; empty if unknown
        self._store: Any = None  # on the rank that hosts the rendezvous
        self._files = FileWriter(by=f"learner/rank-{rank}")

    # ------------------------------------------------------------ start and end

    def open_store(self, host: str) -> int:
        """Open the rendezvous store for the other ranks; returns its port."""
        self._store = deepspeed_start.open_store(self.config.learner, host)
        return self._store.port

    def start(self, master_address: str = "", master_port: int = 0) -> None:
        """Join the other ranks and load the model. A single rank needs no address.

        Raises `ConfigError` for a model that the learner cannot train or the engines cannot serve, and for a loss of
        the user that this node does not have.
        """
        config, learner = self.config, self.config.learner
        torch.set_num_threads(learner.num_threads)
        self.device = deepspeed_start.learner_device(learner)
        # The loss of the user may be missing on this node, or fail on its GPU.
        check_rules(config.algorithm, config.own_folder, ("loss",), self.device)
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
        if address := config.algorithm.served_reference:
            self.reference = ServedReference(address)
        elif folder := config.algorithm.loaded_reference:
            reference = self._load(Path(folder))
            self.reference = reference.to(self.device).requires_grad_(False).eval()
        refuse_changed_logits(self.policy, self.engine, self.device, learner)

    def _load(self, folder: Path, *, trained: bool = False) -> Policy:
        learner = self.config.learner
        way = deepspeed_start.partitioned_loading(learner, self.config.optimizer) if trained else None
        language_model = load_language_model(folder, learner, way)
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
        """What the driver needs for planning."""
        num_parameters = sum(torch.Size(shape).numel() for shape in self.state.shapes.values())
        return replace(rank_facts(self.policy, num_parameters), own_rules=rule_digests(self.config))

    def memory_bytes(self) -> dict[str, int]:
        """Host memory of this process, and its peak device memory; safe from any thread."""
        held = {"host": psutil.Process().memory_info().rss}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            held["device"] = torch.cuda.max_memory_allocated()
        return held

    def release(self) -> None:
        """Release the model and the optimizer; the rank cannot be used after it."""
        self.engine.destroy()
        if isinstance(self.reference, ServedReference):
            self.reference.close()
        del self.engine, self.policy, self.optimizer, self.state, self.reference, self._steps

    def close(self) -> None:
        """Finish the file being written, and leave the process group; no training is possible afterwards."""
        self._files.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ------------------------------------------------------------ training

    def train_rl(self, updates: Sequence[MicroBatches], lr: float) -> UpdateResult:
        """One optimizer step for each of `updates`; the rows carry their token weights.

        With one update its own detached log-probs are the old ones. With several, or when a check is due, a separate
        forward pass first computes the old log-probs of all of them.
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
            loss = PolicyLoss(self.engine, self.config, old=of_update, reference=self._reference_logprobs(update))
            results.append(self._steps.take(update, batches, loss, lr))
            self._seen += zip(update, loss.seen, strict=True)
            drift = max(drift, loss.drift)
        result = as_one(results)
        metrics = {**result.metrics, **self._effective_sample_sizes(list(chain.from_iterable(prepared)))}
        if checked:
            metrics["old_logprobs_drift"] = self._all_max(drift)
        return replace(result, metrics=metrics)

    def _effective_sample_sizes(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Effective sample sizes of the newest `train_rl`'s importance weights, over all ranks."""
        moments = torch.zeros(6, dtype=torch.float64, device=self.device)
        for batch, (_, (_, log_w_N)) in zip(batches, self._seen, strict=True):
            moments += weight_moments(log_w_N, batch.rows_N)
        dist.all_reduce(moments)
        of_tokens, of_rows = moments.tolist()[:3], moments.tolist()[3:]
        return {"ess_tokens": effective_sample_size(*of_tokens), "ess_rows": effective_sample_size(*of_rows)}

    def seen_tokens(self) -> dict[str, SeenTokens]:
        """`SeenTokens` of the newest `train_rl`'s rows, by name. Copied from the device here: few steps need them."""
        return {name: seen for rows, of_rows in self._seen for name, seen in seen_by_row(rows, of_rows)}

    def train_sft(self, micro_batches: MicroBatches, lr: float) -> UpdateResult:
        """One optimizer step of cross-entropy on rows that carry their token weights."""
        batches = [self._collate(rows) for rows in micro_batches]
        return self._steps.take(micro_batches, batches, SftLoss(self.engine), lr)

    def evaluate_sft(self, micro_batches: MicroBatches) -> float:
        """Cross-entropy summed over all ranks, tokens weighted by their row's weight; at temperature 1."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for rows in micro_batches:
            batch = self._collate(rows)
            total -= (batch.weights_N * self._logprobs(batch, self.policy, temperature=1.0)).double().sum()
        dist.all_reduce(total)
        return float(total)

    def logprobs(self, micro_batches: MicroBatches) -> list[Tensor]:
        """Log-probabilities of the rows' sampled tokens at the rollout temperature; per micro batch, concatenated."""
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

    def _reference_logprobs(self, update: MicroBatches) -> LogprobsFn | None:
        reference = self.reference
        if isinstance(reference, ServedReference):
            return reference.ahead(update)
        return None if reference is None else lambda _, batch: self._logprobs(batch, reference)

    def _all_max(self, value: float) -> float:
        largest = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    # ------------------------------------------------------------ weights out and in

    def served_weights(self) -> ServedWeights:
        """The weights that an engine needs to serve the policy."""
        return ServedWeights(
            self.state.served_entries,
            self.state.served,
            self.config.learner.bucket_bytes,
            everywhere=self.config.weight_way == "ipc",
        )

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder that transformers and vLLM load; complete once `written` returns.

        With LoRA, the folder `adapter` beside it is a PEFT folder.
        """
        learner = self.config.learner
        write = model_files.export(folder, self.policy, self.state, learner, source=self._model, base=self._base)
        if write is not None:
            self._files.hand(write)

    def set_policy(self, folder: Path) -> None:
        """Load the weights of a Hugging Face folder of the same architecture; the optimizer state is unchanged."""
        model_files.take_over(folder, self.policy, self.state)
        if self.state.base_replaced:
            self._base = str(folder)

    def reset_optimizer(self) -> None:
        """Reset moments and step count; the policy is unchanged."""
        self.state.clear_moments()
        self._steps.step = 0

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        """Copy the current training state, and `extra`, for a checkpoint.

        The checkpoint is complete once `written` has returned on every rank.
        """
        position = checkpoint.Position(
            step=self.step, calls=self.calls, bad_updates=self._steps.bad_updates, extra=extra, base=self._base
        )
        taken = checkpoint.snapshot(self.state, position, architecture=self.policy.architecture)
        self._files.hand(lambda: taken.write(folder))

    def written(self) -> dict[Path, WrittenFile]:
        """The files that this rank wrote since the last call; waits for them. Safe from any thread.

        Raises the exception of the first failed write.
        """
        return self._files.written()

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Resume from a checkpoint written by any number of ranks; returns its `extra`."""
        position = checkpoint.load(folder, self.state, architecture=self.policy.architecture)
        self._steps.step = position.step
        # Reset the count if it stopped the run: else the resumed run would stop at its first refused update.
        stopped = position.bad_updates >= self.config.optimizer.max_bad_updates
        self._steps.bad_updates = 0 if stopped else position.bad_updates
        self.calls = position.calls
        if self.state.base_replaced:
            self._base = position.base
        self.optimizer.set_steps(position.step)
        return position.extra
