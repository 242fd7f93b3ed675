"""A completion under way: what there is of it, and how another engine goes on with it to the very token."""

from typing import TYPE_CHECKING

from rstar_ray.trajectory import Completion

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

SAMPLED_BEFORE = "sampled_before"
"""Of `SamplingParams.extra_args`: so many tokens at the prompt's end were sampled with the request's own seed."""


def under_way(llm: "AsyncLLM") -> dict[str, Completion]:
    """What vLLM has put together of each request that it samples, by the request's id. Copies."""
    found: dict[str, Completion] = {}
    for request in llm.output_processor.request_states.values():
        flat = request.logprobs_processor.logprobs if request.logprobs_processor else None
        logprobs: list[float] = list(getattr(flat, "logprobs", ()))
        token_ids = list(request.detokenizer.output_token_ids) if request.detokenizer else []
        starts = request.weight_version_starts
        if not token_ids or not starts or len(logprobs) != len(token_ids):
            continue
        ends = [start for _, start in starts[1:]] + [len(token_ids)]
        versions = [int(version) for (version, start), end in zip(starts, ends, strict=True) for _ in range(start, end)]
        found[request.external_req_id] = Completion(
            token_ids=token_ids, logprobs=logprobs, policy_versions=versions, ended=False
        )
    return found
