"""A completion under way: what there is of it, and how another engine goes on with it to the very token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rstar_ray.trajectory import Completion

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

SAMPLED_BEFORE = "sampled_before"
"""Of `SamplingParams.extra_args`: so many tokens at the prompt's end were sampled with the request's own seed."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of one request."""

    start: int  # so many tokens of it came before
    more: Completion


class UnderWay:
    """What vLLM puts together of the requests that it samples, told bit by bit."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}  # tokens, by vLLM's own name of a request

    def new(self, llm: "AsyncLLM") -> dict[str, Sampled]:
        """What was sampled since this was last asked, by the request's id."""
        found: dict[str, Sampled] = {}
        told: dict[str, int] = {}
        for name, request in llm.output_processor.request_states.items():
            token_ids: list[int] = request.detokenizer.output_token_ids if request.detokenizer else []
            flat = request.logprobs_processor.logprobs if request.logprobs_processor else None
            logprobs: list[float] = getattr(flat, "logprobs", [])
            starts, known = request.weight_version_starts, self._told.get(name, 0)
            told[name] = known
            if len(token_ids) == known or not starts or len(logprobs) != len(token_ids):
                continue
            told[name] = len(token_ids)
            versions = _versions(starts, known, len(token_ids))
            more = Completion(
                token_ids=token_ids[known:], logprobs=logprobs[known:], policy_versions=versions, ended=False
            )
            found[request.external_req_id] = Sampled(known, more)
        self._told = told
        return found


def _versions(starts: Sequence[tuple[str, int]], first: int, end: int) -> list[int]:
    """Of the tokens from `first` to `end`; a version with the token that it began with."""
    found: list[int] = []
    for position, (version, start) in enumerate(starts):
        until = starts[position + 1][1] if position + 1 < len(starts) else end
        found += [int(version)] * (until - max(start, first))
    return found
