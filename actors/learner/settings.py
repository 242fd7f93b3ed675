"""What a learner is told once, when it starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rstar_ray.algorithm.batch_plan import BatchLimits, batch_limits
from rstar_ray.algorithm.loss_settings import LossSettings, loss_settings
from rstar_ray.config import RunConfig
from rstar_ray.config.gpus import WeightWay, weight_way

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class LearnerSettings:
    """One record for all ranks; plain values only, so that it travels to every actor. `learner_settings` makes it."""

    model: str  # Hugging Face folder of a causal LM
    world_size: int
    device: Literal["cpu", "cuda"]  # "cuda" is ROCm's name too
    dtype: Literal["float32", "bfloat16"]  # of the forward pass; master weights are float32
    zero: Literal[0, 1, 2, 3]
    offload: bool  # optimizer state and master weights in host memory
    lora_rank: int  # of the adapters that are trained in place of the weights; 0 trains the weights
    lora_alpha: int
    activation_checkpointing: bool
    attention: Literal["rows", "sdpa", "flash_attention_2"]  # "sdpa" pads, the others pack rows end to end
    attention_kernel: Literal["fused", "aiter", "eager"]
    longest_tokens: int  # of a row: prompt and response
    num_threads: int  # CPU threads of a rank
    seed: int
    float32_head: bool  # logits of a bfloat16 model in float32
    deterministic: bool  # no kernel whose sums come in another order each time

    weight_decay: float  # not applied to norms and biases
    betas: tuple[float, float]
    epsilon: float
    grad_clip: float  # largest global gradient norm; 0 clips nothing

    loss: LossSettings
    batch: BatchLimits
    logprob_chunk_tokens: int  # tokens whose logits exist at one time
    updates_per_step: int  # optimizer steps one train_rl call is split into
    check_old_logprobs_every: int  # calls between those that compute old_logprobs apart; 0 never
    reference_model: str  # folder of the policy a KL term is taken to

    save_bad_updates: str  # where the rows of updates that were not finite are saved; empty saves none
    bucket_bytes: int
    weight_way: WeightWay  # how a version gets to the engines
    engine_deadline_s: float  # for an engine's answer while weights are sent to it
    start_deadline_s: float
    step_deadline_s: float  # of an update, a publish, a checkpoint

    @property
    def environment(self) -> dict[str, str]:
        """Of a rank's process, as cuBLAS, flash attention and DeepSpeed look for it when they start."""
        env = {"OMP_NUM_THREADS": str(self.num_threads), "TOKENIZERS_PARALLELISM": "false"}
        if self.device == "cpu":
            env["DS_ACCELERATOR"] = "cpu"
        if self.deterministic:
            env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
        return env

    @property
    def packed(self) -> bool:
        """Whether the rows of a micro batch lie end to end, without padding."""
        return self.batch.packed


def learner_settings(config: RunConfig, model: Path) -> LearnerSettings:
    """The learner that trains a run's policy, whose weights lie in the folder `model`."""
    learner, optimizer = config.learner, config.optimizer
    return LearnerSettings(
        model=str(model),
        world_size=learner.ranks,
        device="cuda" if learner.gpus_per_rank else "cpu",
        dtype=learner.dtype,
        zero=learner.zero,
        offload=learner.offload,
        lora_rank=learner.lora_rank,
        lora_alpha=learner.lora_alpha,
        activation_checkpointing=learner.activation_checkpointing,
        attention=learner.attention,
        attention_kernel=learner.attention_kernel,
        longest_tokens=config.engine.max_context_tokens,
        num_threads=learner.num_threads,
        seed=config.seed,
        float32_head=config.float32_head,
        deterministic=config.deterministic,
        weight_decay=optimizer.weight_decay,
        betas=(optimizer.beta1, optimizer.beta2),
        epsilon=optimizer.epsilon,
        grad_clip=optimizer.grad_clip,
        loss=loss_settings(config),
        batch=batch_limits(learner),
        logprob_chunk_tokens=learner.logprob_chunk_tokens,
        updates_per_step=optimizer.updates_per_step,
        check_old_logprobs_every=learner.check_old_logprobs_every,
        reference_model=config.algorithm.reference_model,
        save_bad_updates=optimizer.save_bad_updates,
        bucket_bytes=learner.bucket_mb * MIB,
        weight_way=weight_way(config.engine, learner),
        engine_deadline_s=config.engine.answer_deadline_s,
        start_deadline_s=learner.start_deadline_s,
        step_deadline_s=learner.step_deadline_s,
    )
