"""Entropies of a policy on trajectories, by one forward pass over each. torch and transformers load when used."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Entropies:
    """A policy in a Hugging Face folder; on a GPU where there is one."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self._model = model.to(self._device).eval()

    def of(self, ids: Sequence[int], sampled: Sequence[bool]) -> NDArray[np.float64]:
        """[T] nats of the distribution that each sampled token was drawn from, at temperature 1."""
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([list(ids)], device=self._device)).logits[0, :-1].float()
            logprobs = torch.log_softmax(logits, dim=-1)
            entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        return entropy.double().cpu().numpy()[np.asarray(sampled[1:], dtype=np.bool_)]
