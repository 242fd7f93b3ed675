"""What the benchmarks run under: a run's settings, for a tiny model on the CPU."""

from rstar_ray.config import RunConfig, with_values

SMALL = with_values(
    RunConfig(),
    {
        "engine.dtype": "float32",
        "engine.max_context_tokens": 2_048,
        "engine.max_running": 128,
        "rollout.max_response_tokens": 1_024,
        "evaluate.max_response_tokens": 1_024,
        "learner.dtype": "float32",
        "learner.zero": 1,
        "learner.activation_checkpointing": False,
        "learner.micro_batch_tokens": 2_048,
    },
)
