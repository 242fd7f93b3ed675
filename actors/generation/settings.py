"""What an engine is told once, when it starts."""

from dataclasses import dataclass
from pathlib import Path

from actors.weights.adapter_folder import AdapterSettings, saved_adapter
from rstar_ray.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is started with; the same fields on CPU, CUDA and ROCm. `engine_settings` makes it."""

    model: str  # a Hugging Face folder
    dtype: str
    float32_head: bool  # logits of a bfloat16 model in float32
    max_model_len: int  # prompt and response together [tokens]
    kv_tokens: int | None  # room of the KV cache [tokens]; None: what `gpu_memory_utilization` leaves
    block_size: int  # tokens in a KV block; vLLM's CPU kernels want a multiple of 32
    max_num_seqs: int  # sequences decoded at once
    enforce_eager: bool  # False: torch.compile and, on GPUs, graphs
    tensor_parallel_size: int
    gpu_memory_utilization: float  # share of the device's memory, weights included
    seed: int  # of what no request seeds
    batch_invariant: bool  # on GPUs: a sequence's numbers do not depend on those decoded beside it
    num_threads: int  # CPU threads of a worker; unused on GPUs
    measure_cost: bool  # tell what its steps cost, for the balancer
    vllm_metrics: bool  # hand vLLM's own statistics to Ray's metrics
    adapter: AdapterSettings | None
    start_deadline_s: float
    generate_deadline_s: float  # for one completion, its time in the engine's queue included
    control_deadline_s: float  # for any other answer of the engine
    step_limit_s: float  # longest it may have work and take no step before it is killed

    @property
    def weights(self) -> str:
        """The folder of the weights that it starts with."""
        return self.adapter.base if self.adapter is not None else self.model

    @property
    def num_blocks(self) -> int | None:
        """Of the KV cache; one more than the tokens need, which vLLM keeps for itself."""
        return None if self.kv_tokens is None else -(-self.kv_tokens // self.block_size) + 1


def engine_settings(config: RunConfig, model: Path, *, learner: bool = False) -> EngineSettings:
    """An engine of a run that serves the policy in the folder `model`, or what a learner publishes from there on."""
    engine = config.engine
    return EngineSettings(
        model=str(model),
        dtype=engine.dtype,
        float32_head=config.float32_head,
        max_model_len=engine.max_context_tokens,
        kv_tokens=engine.kv_tokens or None,
        block_size=engine.block_size,
        max_num_seqs=engine.max_running,
        enforce_eager=engine.gpus_per_replica == 0 or not engine.compile,
        tensor_parallel_size=engine.tensor_parallel,
        gpu_memory_utilization=engine.gpu_memory_share,
        seed=config.seed,
        batch_invariant=config.deterministic,
        num_threads=engine.num_threads,
        measure_cost=config.balancer.measured,
        vllm_metrics=engine.vllm_metrics,
        adapter=_adapter(config, model, learner),
        start_deadline_s=engine.start_deadline_s,
        generate_deadline_s=engine.completion_deadline_s,
        control_deadline_s=engine.answer_deadline_s,
        step_limit_s=config.detector.engine_step_s,
    )


def _adapter(config: RunConfig, model: Path, learner: bool) -> AdapterSettings | None:
    """The learner's, or the one that the folder's model was merged with: in bfloat16 merging rounds most of it away."""
    if learner:
        rank, alpha = config.learner.lora_rank, config.learner.lora_alpha
        return AdapterSettings(base=str(model), rank=rank, alpha=alpha) if rank else None
    return saved_adapter(model.absolute()) if config.engine.dtype != "float32" else None
