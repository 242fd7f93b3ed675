"""One rank of the learner: a DeepSpeed engine around a Hugging Face causal LM. No Ray here.

Every public method but the constructor and `close` is a collective: all ranks call it with work of the same shape.
"""

import contextlib
import json
import logging
import math
import os
import random
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from actors.learner import row_attention
from actors.learner.settings import LearnerSettings
from actors.weights.buckets import WeightBucket, pack
from rstar_ray.algorithm.batch import MicroBatch, TokenRow, collate
from rstar_ray.algorithm.loss import LossStats, likelihood_loss, policy_loss, token_logprobs
from rstar_ray.algorithm.loss_settings import Normalisation
from rstar_ray.algorithm.lr_schedule import LrSchedule
from rstar_ray.algorithm.update import UpdateResult
from rstar_ray.errors import ConfigError, LearnerError

MicroBatches = Sequence[Sequence[TokenRow]]  # of one rank; a micro batch may be empty

CHECKPOINT_FACTS = "learner.json"
GENERATORS = "generators.pt"
SHARD_BYTES = 2 * 2**30
NOT_WEIGHTS = ("tokenizer*", "*.jinja", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What a started rank says of itself."""

    architecture: str
    num_parameters: int
    max_context_tokens: int
    attention_tokens: float  # length at which attention costs as much as the rest of the model
    device: str


class Policy(nn.Module):
    """A causal LM that answers with log-probabilities of chosen tokens in place of logits."""

    def __init__(self, language_model: Any, chunk_tokens: int, temperature: float) -> None:
        super().__init__()
        head = language_model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or cast(Any, head.bias) is not None:
            raise ConfigError(
                "learner.model", f"its output layer is {head}", "use a causal LM with a plain linear head"
            )
        self.language_model = language_model
        language_model.set_output_embeddings(LogprobHead(head.weight, chunk_tokens, temperature))

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each sampled token: two float32 [N]."""
        ours = self.language_model.config._attn_implementation == row_attention.NAME
        rows = {"row_lengths": batch.row_lengths} if ours else {}
        hidden_BTH = self.language_model.base_model(
            input_ids=batch.input_ids_BT, position_ids=batch.position_ids_BT, use_cache=False, **rows
        ).last_hidden_state
        hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, batch.positions_N)
        return self.language_model.get_output_embeddings()(hidden_NH, batch.targets_N)


class LogprobHead(nn.Module):
    """The output layer; as a module of its own, so that ZeRO-3 gathers its weight around it."""

    def __init__(self, weight_VH: Tensor, chunk_tokens: int, temperature: float) -> None:
        super().__init__()
        self.weight = cast(nn.Parameter, weight_VH)
        self.chunk_tokens = chunk_tokens
        self.temperature = temperature

    def forward(self, hidden: Tensor, targets_N: Tensor | None = None) -> Any:
        """Logits as the model's own layer gives them, or with targets their log-probabilities and entropies."""
        if targets_N is None:
            return nn.functional.linear(hidden, self.weight)
        return token_logprobs(
            hidden, self.weight, targets_N, chunk_tokens=self.chunk_tokens, temperature=self.temperature
        )


class LearnerRank:
    """Trains one policy together with the other ranks; see `actors.learner.gang` for its Ray shell."""

    def __init__(self, settings: LearnerSettings, rank: int = 0) -> None:
        self.settings = settings
        self.rank = rank
        self.schedule: LrSchedule = settings.schedule
        self.step = 0  # optimizer steps applied
        self.calls = 0  # of train_rl
        self.bad_updates = 0  # in a row
        self._store: dist.TCPStore | None = None  # held by the rank that the others meet at

    # ------------------------------------------------------------ start and end

    def start(self, master_address: str = "", master_port: int = 0) -> None:
        """Join the other ranks and load the model. A single rank needs no address."""
        settings = self.settings
        torch.set_num_threads(settings.num_threads)
        on_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        if not on_gpu:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        self._join(master_address, master_port, "nccl" if on_gpu else "gloo")
        self._build()

    def open_store(self, host: str) -> int:
        """Listen for the other ranks; returns the port. It is never let go in between, so nobody else can take it."""
        settings = self.settings
        deadline = timedelta(seconds=settings.start_deadline_s)
        self._store = dist.TCPStore(
            host, 0, settings.world_size, is_master=True, timeout=deadline, wait_for_workers=False
        )
        return self._store.port

    def _join(self, master_address: str, master_port: int, backend: str) -> None:
        settings = self.settings
        if dist.is_initialized():
            if dist.get_world_size() != settings.world_size:
                raise LearnerError(f"this process already belongs to a group of {dist.get_world_size()} ranks")
            return
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(settings.world_size), LOCAL_RANK="0")
        if settings.world_size == 1:
            store: Any = dist.HashStore()
        else:
            os.environ.update(MASTER_ADDR=master_address, MASTER_PORT=str(master_port))
            deadline = timedelta(seconds=settings.start_deadline_s)
            store = self._store or dist.TCPStore(
                master_address, master_port, settings.world_size, is_master=False, timeout=deadline
            )
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=settings.world_size,
            timeout=timedelta(seconds=settings.step_deadline_s),
        )

    def _build(self) -> None:
        import transformers

        deepspeed = _quiet_deepspeed()
        from actors.learner.state import LearnerState, RefusingAdamW

        settings = self.settings
        seed = (settings.seed + self.rank) % 2**32
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        transformers.utils.logging.disable_progress_bar()
        language_model = _load(settings.model, settings)
        self.config = language_model.config
        if settings.activation_checkpointing:
            language_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = Policy(language_model, settings.logprob_chunk_tokens, settings.loss.temperature).to(self.device)
        self.optimizer = RefusingAdamW(
            _parameter_groups(policy, settings.weight_decay),
            lr=self.schedule.at(0),
            betas=settings.betas,
            eps=settings.epsilon,
            fused=self.device.type == "cuda" and not settings.offload,
        )
        if settings.zero_stage == 0:
            self.optimizer.clip_here = settings.grad_clip
        self.engine = deepspeed.initialize(
            model=policy,
            optimizer=self.optimizer,
            config=_deepspeed_config(settings, self.device.type),
            dist_init_required=False,
        )[0]
        self.state = LearnerState(self.engine, policy.language_model, self.optimizer, settings.zero_stage)
        self.policy = policy
        self.reference = self._load_reference()
        self.engine.train()
        self._check_head()

    def _load_reference(self) -> Policy | None:
        """The reference of a KL term, whole on every rank in the forward pass's type."""
        settings = self.settings
        if not settings.loss.kl_coefficient:
            return None
        reference = Policy(
            _load(settings.reference_model, settings), settings.logprob_chunk_tokens, settings.loss.temperature
        )
        return reference.to(self.device).requires_grad_(False).eval()

    def _check_head(self) -> None:
        """Refuse a model that does more to its logits than its output layer (scales or caps them)."""
        row = TokenRow("probe", np.arange(1, 9, dtype=np.int32), np.ones(8, np.bool_))
        batch = collate([row], Normalisation.TOKEN, count=1).to(self.device)
        self.engine.eval()
        with torch.no_grad():
            ours_N, _ = self.policy(batch)
            logits_NV = self.policy.language_model(input_ids=batch.input_ids_BT, use_cache=False).logits[0].float()
        self.engine.train()
        theirs_N = (logits_NV / self.settings.loss.temperature).log_softmax(-1).gather(-1, batch.targets_N[:, None])
        if not torch.allclose(ours_N, theirs_N[:, 0], atol=1e-3 if logits_NV.dtype == torch.float32 else 0.1):
            raise ConfigError(
                "learner.model",
                f"{self.architecture} changes its logits after its output layer",
                "use a model whose logits are hidden @ weight",
            )

    @property
    def architecture(self) -> str:
        """A readable name for what must agree between a checkpoint and this model."""
        config = self.config
        name = (getattr(config, "architectures", None) or [type(self.policy.language_model).__name__])[0]
        return (
            f"{name}(hidden {config.hidden_size}, layers {config.num_hidden_layers}, "
            f"heads {config.num_attention_heads}, vocabulary {config.vocab_size})"
        )

    def facts(self) -> RankFacts:
        """What the front plans with."""
        config = self.config
        num_parameters = sum(math.prod(shape) for shape in self.state.shapes.values())
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = config.num_attention_heads * head_dim * config.num_hidden_layers
        on_gpu = self.device.type == "cuda"
        return RankFacts(
            architecture=self.architecture,
            num_parameters=num_parameters,
            max_context_tokens=int(getattr(config, "max_position_embeddings", 2**31)),
            # 2 flops a parameter and token, and on average half a length of keys: 2 * width flops each.
            attention_tokens=num_parameters / width,
            device=torch.cuda.get_device_name(self.device) if on_gpu else "cpu",
        )

    def release(self) -> None:
        """Let go of the model and the optimizer; the rank cannot be used after it."""
        self.engine.destroy()
        del self.engine, self.policy, self.optimizer, self.state, self.reference

    def close(self) -> None:
        """Leave the group; the process is of no further use for learning."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # ------------------------------------------------------------ training

    def train_rl(self, updates: Sequence[MicroBatches], counts: Sequence[int], lr: float | None = None) -> UpdateResult:
        """One optimizer step for each of `updates`; `counts` are their normalisation counts over all ranks.

        With one update, `old_logprobs` are the update's own log-probs, detached: the weights that the
        forward pass uses are the ones before the update, so both are the same computation, and the
        ratio is exactly 1. With more, or where a check is due, a pass of their own computes them first.
        """
        self.calls += 1
        every = self.settings.check_old_logprobs_every
        checked = len(updates) == 1 and every > 0 and self.calls % every == 0
        settings = self.settings.loss
        prepared = [
            [self._collate(rows, settings.normalisation, count, settings.constant_tokens) for rows in update]
            for update, count in zip(updates, counts, strict=True)
        ]
        old = (
            [[self._logprobs(batch) for batch in batches] for batches in prepared]
            if checked or len(updates) > 1
            else []
        )
        drift = 0.0
        results: list[UpdateResult] = []
        for number, (update, batches) in enumerate(zip(updates, prepared, strict=True)):

            def loss_of(index: int, batch: MicroBatch, number: int = number) -> tuple[Tensor, LossStats]:
                nonlocal drift
                logprobs_N, entropy_N = self.engine(batch)
                old_N = old[number][index] if old else logprobs_N.detach()
                if checked and len(old_N):
                    drift = max(drift, float((old_N - logprobs_N.detach()).abs().max()))
                return policy_loss(
                    logprobs_N,
                    entropy_N,
                    old_N,
                    batch.rollout_logprobs_N,
                    batch.advantages_N,
                    batch.weights_N,
                    batch.rows_N,
                    settings,
                    None if self.reference is None else self._logprobs(batch, self.reference),
                )

            results.append(self._update(update, batches, loss_of, lr))
        return _combined(results, checked, self._all_max(drift) if checked else 0.0)

    def train_sft(self, micro_batches: MicroBatches, count: int, lr: float | None = None) -> UpdateResult:
        """One optimizer step of cross-entropy; `count` is the number of tokens with a loss, every rank's."""
        batches = [self._collate(rows, Normalisation.TOKEN, count) for rows in micro_batches]

        def loss_of(index: int, batch: MicroBatch) -> tuple[Tensor, LossStats]:
            logprobs_N, entropy_N = self.engine(batch)
            return likelihood_loss(logprobs_N, entropy_N, batch.weights_N)

        return self._update(micro_batches, batches, loss_of, lr)

    def evaluate_sft(self, micro_batches: MicroBatches, count: int) -> float:
        """Mean cross-entropy per token with a loss, over all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for rows in micro_batches:
            batch = self._collate(rows, Normalisation.TOKEN, count)
            total -= (batch.weights_N * self._logprobs(batch)).double().sum()
        dist.all_reduce(total)
        return float(total)

    def logprobs(self, micro_batches: MicroBatches) -> list[Tensor]:
        """The policy's log-probability of each row's sampled tokens, laid end to end, by micro batch."""
        return [self._logprobs(self._collate(rows, Normalisation.TOKEN, 1)).cpu() for rows in micro_batches]

    def _collate(self, rows: Sequence[TokenRow], mode: Normalisation, count: int, constant: int = 1) -> MicroBatch:
        packed = self.settings.packed
        return collate(rows, mode, count=count, constant=constant, packed=packed).to(self.device)

    def _logprobs(self, batch: MicroBatch, policy: Policy | None = None) -> Tensor:
        self.engine.eval()
        with torch.no_grad():
            logprobs_N, _ = (policy or self.policy)(batch)
        self.engine.train()
        return logprobs_N

    def _update(
        self, micro_batches: MicroBatches, batches: Sequence[MicroBatch], loss_of: Any, lr: float | None
    ) -> UpdateResult:
        started = time.perf_counter()
        lr = self.schedule.at(self.step) if lr is None else lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # [tokens, input tokens, padded tokens, the seven sums of LossStats]
        sums = torch.zeros(10, dtype=torch.float64, device=self.device)
        maxima = torch.zeros(2, dtype=torch.float64, device=self.device)
        losses: list[Tensor] = []
        for index, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            loss, stats = loss_of(index, batch)
            # DeepSpeed averages gradients over ranks; the loss is a share of one global sum.
            self.engine.backward(loss * self.settings.world_size)
            losses.append(loss.detach())
            sums[0] += len(batch.targets_N)
            sums[1] += batch.num_input_tokens
            sums[2] += batch.num_padded_tokens
            sums[3:] += stats.sums
            maxima = torch.maximum(maxima, stats.maxima)
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
        total_loss = float(sums[3])
        self.optimizer.refuse = not math.isfinite(total_loss)
        self.engine.step()
        grad_norm = self._grad_norm()
        applied = math.isfinite(total_loss) and math.isfinite(grad_norm)
        if applied:
            self.step += 1
            self.bad_updates = 0
        tokens = max(float(sums[0]), 1.0)
        reason = "" if applied else self._bad_update(micro_batches, losses, total_loss, grad_norm)
        return UpdateResult(
            applied=applied,
            reason=reason,
            step=self.step,
            loss=total_loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=int(sums[0]),
            input_tokens=int(sums[1]),
            padding_waste=1.0 - float(sums[1]) / max(float(sums[2]), 1.0),
            seconds=time.perf_counter() - started,
            entropy=float(sums[4]) / tokens,
            clip_share=float(sums[5]) / tokens,
            ratio_mean=float(sums[6]) / tokens,
            kl=float(sums[7]) / tokens,
            logprob_diff_mean=float(sums[8]) / tokens,
            correction_mean=float(sums[9]) / tokens,
            ratio_max=float(maxima[0]),
            logprob_diff_max=float(maxima[1]),
        )

    def _grad_norm(self) -> float:
        """Of the last step, over all ranks, before clipping; not finite where any gradient was not."""
        if self.settings.zero_stage == 0:
            return self.optimizer.grad_norm
        norm = float(self.engine.get_global_grad_norm() or 0.0)
        return norm if norm >= 0 else math.inf  # DeepSpeed says -1 for a norm that is not finite

    def _bad_update(self, micro_batches: MicroBatches, losses: Sequence[Tensor], loss: float, grad_norm: float) -> str:
        """Say where it broke, save the batch, and stop the run when it happens too often."""
        self.bad_updates += 1
        suspects = [
            row.name
            for rows, of_batch in zip(micro_batches, losses, strict=True)
            for row in rows
            if not math.isfinite(float(of_batch))
            and (not math.isfinite(row.advantage) or not _all_finite(row.rollout_logprobs))
        ] or [
            row.name
            for rows, of_batch in zip(micro_batches, losses, strict=True)
            for row in rows
            if not math.isfinite(float(of_batch))
        ]
        by_rank: list[Any] = [None] * self.settings.world_size
        dist.all_gather_object(by_rank, suspects)
        named = "; ".join(f"rank {rank}: {', '.join(names[:4])}" for rank, names in enumerate(by_rank) if names)
        reason = f"loss {loss:g}, gradient norm {grad_norm:g} ({named or 'no row of its own stands out'})"
        if self.settings.inspect_dir:
            path = Path(self.settings.inspect_dir) / f"update-{self.step + 1:06d}-rank-{self.rank}.npz"
            save_rows([row for rows in micro_batches for row in rows], path)
        if self.bad_updates >= self.settings.max_bad_updates:
            raise LearnerError(
                f"{self.bad_updates} updates in a row not finite at optimizer step {self.step + 1}, "
                f"rank {self.rank}: {reason}"
            )
        return reason

    def _all_max(self, value: float) -> float:
        whole = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(whole, dist.ReduceOp.MAX)
        return float(whole)

    # ------------------------------------------------------------ weights out and in

    def weight_buckets(self) -> Iterator[WeightBucket]:
        """The weights as an engine serves them, on rank 0; the other ranks only take part."""
        return pack(self.state.served(self.settings.bucket_bytes), self.settings.bucket_bytes)

    def export(self, folder: Path) -> None:
        """An ordinary Hugging Face folder, written by rank 0: safetensors, config, tokenizer, generation config."""
        tensors = {p.name: _tensor(p.array.copy(), p.dtype_name) for p in self.state.served(SHARD_BYTES)}
        if self.rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.policy.language_model.save_pretrained(folder, state_dict=tensors)
        for pattern in NOT_WEIGHTS:
            for source in sorted(Path(self.settings.model).glob(pattern)):
                shutil.copyfile(source, folder / source.name)
        for written in folder.glob("*.safetensors"):
            written.chmod(0o644)  # safetensors leaves them readable by their owner alone

    def set_policy(self, folder: Path) -> None:
        """Take over the weights of a Hugging Face folder of the same architecture; the optimizer stays."""
        tensors: dict[str, Tensor] = {}
        if self.rank == 0:
            other = _load(str(folder), self.settings, dtype=torch.float32)
            tensors = dict(other.named_parameters())
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._refuse_other_shapes(shapes, str(folder))
        for name in self.state.shapes:
            self.state.set(name, tensors[name].detach() if self.rank == 0 else None)

    def reset_optimizer(self, schedule: LrSchedule | None = None) -> None:
        """Forget the moments and the schedule's position; the policy stays."""
        self.state.clear_moments()
        self.step = 0
        self.schedule = schedule or self.schedule

    def save_checkpoint(self, folder: Path, extra: dict[str, Any]) -> None:
        """Master weights, moments, steps and every rank's generators, whole: it loads on any number of ranks.

        Written by rank 0, one parameter at a time.
        """
        from safetensors.torch import save_file

        generators: list[Any] = [None] * self.settings.world_size
        dist.all_gather_object(generators, _generators())
        self.state.prepare_moments()
        folder.mkdir(parents=True, exist_ok=True)
        shard: dict[str, Tensor] = {}
        shards = 0
        size = 0
        for name in self.state.shapes:
            for moment in (None, "exp_avg", "exp_avg_sq"):
                tensor = self.state.get(name, moment)
                if self.rank == 0:
                    shard[f"{name}/{moment or 'weight'}"] = tensor.detach().cpu().clone()
                    size += tensor.numel() * 4
            if size >= SHARD_BYTES:
                save_file(shard, folder / f"state-{shards:05d}.safetensors")
                shard, shards, size = {}, shards + 1, 0
        if self.rank != 0:
            return
        if shard:
            save_file(shard, folder / f"state-{shards:05d}.safetensors")
            shards += 1
        torch.save(generators, folder / GENERATORS)
        facts = {
            "architecture": self.architecture,
            "step": self.step,
            "calls": self.calls,
            "shards": shards,
            "world_size": self.settings.world_size,
            "schedule": {name: getattr(self.schedule, name) for name in self.schedule.__slots__},
            "shapes": {name: list(shape) for name, shape in self.state.shapes.items()},
            "extra": extra,
        }
        (folder / CHECKPOINT_FACTS).write_text(json.dumps(facts, indent=1))

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        """Take over a checkpoint, from any number of ranks; returns its `extra`.

        Raises ConfigError, on all ranks, for another architecture. A rank the checkpoint did not have
        keeps its own generators.
        """
        from safetensors import safe_open

        shared: list[Any] = [None]
        if self.rank == 0:
            try:
                facts = json.loads((folder / CHECKPOINT_FACTS).read_text())
                shared = [(facts, torch.load(folder / GENERATORS, weights_only=True))]
            except (OSError, ValueError) as error:
                shared = [f"cannot read {folder}: {error}"]
        dist.broadcast_object_list(shared, 0)
        if isinstance(shared[0], str):
            raise ConfigError("learner.checkpoint", shared[0], "name a whole checkpoint")
        facts, generators = shared[0]
        theirs = {name: tuple(shape) for name, shape in facts["shapes"].items()}
        self._refuse_other_shapes(theirs, f"checkpoint {folder} of {facts['architecture']}")
        self.state.prepare_moments()
        with contextlib.ExitStack() as stack:
            places: dict[str, Any] = {}
            if self.rank == 0:
                for index in range(facts["shards"]):
                    path = folder / f"state-{index:05d}.safetensors"
                    opened = stack.enter_context(safe_open(path, framework="pt"))
                    places.update(dict.fromkeys(opened.keys(), opened))
            for name in self.state.shapes:
                for moment in (None, "exp_avg", "exp_avg_sq"):
                    key = f"{name}/{moment or 'weight'}"
                    self.state.set(name, places[key].get_tensor(key) if self.rank == 0 else None, moment)
        self.step, self.calls = facts["step"], facts["calls"]
        self.schedule = LrSchedule(**facts["schedule"])
        self.optimizer.set_steps(self.step)
        if self.rank < len(generators):
            _set_generators(generators[self.rank])
        return facts["extra"]

    def _refuse_other_shapes(self, theirs: dict[str, tuple[int, ...]], name: str) -> None:
        """Rank 0 compares, all ranks hear the answer."""
        differing = sorted(set(theirs.items()) ^ set(self.state.shapes.items()))
        answer: list[Any] = [differing[0][0] if differing else None]
        dist.broadcast_object_list(answer, 0)
        if answer[0] is not None:
            raise ConfigError(
                "learner.checkpoint",
                f"{name} does not fit {self.architecture} (they differ in {answer[0]})",
                "name one of the same architecture",
            )


# ---------------------------------------------------------------- pieces


def _quiet_deepspeed() -> Any:
    """DeepSpeed, which logs every setting at every start, with only its errors left."""
    with contextlib.redirect_stdout(None):
        import deepspeed
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Shared-memory collectives for CPU inference: unused here, and compiled for minutes at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _load(folder: str, settings: LearnerSettings, dtype: torch.dtype | None = None) -> Any:
    import transformers

    if not (Path(folder) / "config.json").is_file():
        raise ConfigError("learner.model", f"no model in {folder!r}", "name a Hugging Face folder with a config.json")
    attention = row_attention.register() if settings.attention == row_attention.NAME else settings.attention
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or getattr(torch, settings.dtype), attn_implementation=attention
    )


def _parameter_groups(policy: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """One group, or two where there is weight decay: none on vectors (norms, biases)."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    if not weight_decay:
        return [{"params": parameters, "weight_decay": 0.0}]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _deepspeed_config(settings: LearnerSettings, device: str) -> dict[str, Any]:
    """Micro batches and their scale are ours: DeepSpeed is told of one micro batch a step."""
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": device == "cuda"}
    if settings.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device == "cuda"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0 if settings.zero_stage == 0 else settings.grad_clip,
        "steps_per_print": None,
    }
    if settings.dtype == "bfloat16":
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config


def _generators() -> dict[str, Any]:
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), *(float(value) for value in rest)),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _combined(results: Sequence[UpdateResult], checked: bool, drift: float) -> UpdateResult:
    """Several optimizer steps as one result: means by tokens, the last one's position."""
    last = results[-1]
    if len(results) == 1:
        return replace(last, old_logprobs_checked=checked, old_logprobs_drift=drift)
    tokens = sum(result.tokens for result in results)

    def mean(name: str) -> float:
        return sum(getattr(result, name) * result.tokens for result in results) / max(tokens, 1)

    means = ("loss", "grad_norm", "entropy", "clip_share", "ratio_mean", "kl", "logprob_diff_mean", "correction_mean")
    return replace(
        last,
        applied=all(result.applied for result in results),
        reason="; ".join(result.reason for result in results if result.reason),
        tokens=tokens,
        input_tokens=sum(result.input_tokens for result in results),
        seconds=sum(result.seconds for result in results),
        ratio_max=max(result.ratio_max for result in results),
        logprob_diff_max=max(result.logprob_diff_max for result in results),
        **{name: mean(name) for name in (*means, "padding_waste")},
    )


def save_rows(rows: Sequence[TokenRow], path: Path) -> None:
    """Rows as one npz, for inspection: `names`, `advantages`, and per row `ids-i`, `mask-i`, `logprobs-i`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {
        "names": np.array([row.name for row in rows]),
        "advantages": np.array([row.advantage for row in rows]),
    }
    for index, row in enumerate(rows):
        arrays[f"ids-{index}"], arrays[f"mask-{index}"] = row.token_ids, row.loss_mask
        if row.rollout_logprobs is not None:
            arrays[f"logprobs-{index}"] = row.rollout_logprobs
    np.savez_compressed(path, **arrays)


def _all_finite(values: Any) -> bool:
    return values is None or bool(np.isfinite(values).all())


def _tensor(array: Any, dtype_name: str) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype_name == "bfloat16" else tensor
