"""Log-probs of a reference model that a vLLM server holds, instead of each learner rank.

A row's tokens are sent as the prompt of a completion; the server answers with the log-probs of the prompt. They are
those of temperature 1, and differ from a loaded model's about as much as an engine's do from the learner's.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rstar_ray.algorithm.batch import MicroBatch, TokenRow
from rstar_ray.errors import ConfigError, LearnerError

OPTION = "--algorithm.reference-model"
REQUESTS_AT_ONCE = 32
"""Of one rank: enough for the server to batch them."""
ANSWER_S = 600.0
"""Longest wait for one answer, in the server's queue too."""
RETRY_S = 300.0
"""How long requests to a server that cannot be reached, or is overloaded, are retried: it may be restarting."""
PAUSE_S = 2.0
PROBE = "def f(n):\n    return 3 * n + 12  # naïve, 数学, <|im_end|>"
"""Text on which two tokenizers are compared."""

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy: the server is on the local network


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as its server reports it."""

    name: str
    max_model_len: int  # longest prompt and answer [tokens]; 0 if it is not reported


def served_model(address: str) -> ServedModel:
    """The first model of a server. Raises `ConfigError` where none answers."""
    try:
        first = _answer(f"{address}/v1/models", None)["data"][0]
        return ServedModel(name=str(first["id"]), max_model_len=int(first.get("max_model_len") or 0))
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as failed:
        hint = (
            "start it (examples/distillation.py has the command), and give its address, such as http://127.0.0.1:8000"
        )
        raise ConfigError(OPTION, f"no model is served at {address} ({_said(failed)})", hint) from failed


def refuse_unfit(address: str, *, context: int, token_ids: Callable[[str], Sequence[int]]) -> None:
    """Raise `ConfigError` for a server that does not answer, has a shorter context, or another tokenizer.

    `token_ids`: the policy's tokenizer, without added special tokens.
    """
    model = served_model(address)
    if model.max_model_len and model.max_model_len <= context:  # it also generates one token
        problem = (
            f"{model.name} at {address} is served with {model.max_model_len} tokens, and rows have up to {context}"
        )
        raise ConfigError(OPTION, problem, f"serve it with --max-model-len {context + 1}, or more")
    try:
        asked = {"model": model.name, "prompt": PROBE, "add_special_tokens": False}
        theirs = _answer(f"{address}/tokenize", asked)["tokens"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as failed:
        raise ConfigError(
            OPTION, f"{address} does not answer as vLLM does ({_said(failed)})", "serve it by vLLM"
        ) from failed
    if list(theirs) != list(token_ids(PROBE)):
        problem = f"{model.name} at {address} has another tokenizer than --model"
        raise ConfigError(OPTION, problem, "serve a model with the tokenizer of --model")


class ServedReference:
    """A served reference model, asked for whole updates ahead."""

    def __init__(self, address: str) -> None:
        """Raises `ConfigError` where no model is served."""
        self._address = address
        self._name = served_model(address).name
        self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="reference")

    def ahead(self, micro_batches: Sequence[Sequence[TokenRow]]) -> Callable[[int, MicroBatch], Any]:
        """Send the rows of an update. The result gives, for a micro batch, the log-probs of its sampled tokens: [N].

        It raises `LearnerError` for a server that fails, or is away for longer than `RETRY_S`.
        """
        asked = [
            [self._threads.submit(self._logprobs, row) for row in rows if len(row.token_ids) > 1]
            for rows in micro_batches
        ]

        def of(index: int, batch: MicroBatch) -> Any:
            try:
                return _joined(asked[index], batch)
            except BaseException:  # the update ends
                for one in chain.from_iterable(asked):
                    one.cancel()
                raise

        return of

    def close(self) -> None:
        """Cancel requests that have not been sent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _logprobs(self, row: TokenRow) -> NDArray[np.float32]:
        """[number of the row's sampled tokens]"""
        ids = row.token_ids.tolist()
        asked = {"model": self._name, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self._retried(asked, row.name)
        try:
            of_prompt: list[Mapping[str, Any] | None] = answer["choices"][0]["prompt_logprobs"]
            if len(of_prompt) != len(ids):
                raise LookupError(f"{len(of_prompt)} log-probs for {len(ids)} tokens")
            places = np.flatnonzero(row.loss_mask[1:]) + 1  # nothing predicts the first token
            found = [(of_prompt[place] or {})[str(ids[place])]["logprob"] for place in places]
        except (LookupError, TypeError) as failed:
            raise LearnerError(f"{OPTION} {self._address}: {row.name}: no log-probs ({_said(failed)})") from failed
        return np.asarray(found, np.float32)

    def _retried(self, asked: Mapping[str, Any], name: str) -> Any:
        until = 0.0  # set at the first failure
        while True:
            try:
                return _answer(f"{self._address}/v1/completions", asked)
            except (OSError, http.client.HTTPException, ValueError) as failed:
                until = until or time.monotonic() + RETRY_S
                refused = isinstance(failed, urllib.error.HTTPError) and failed.code < 500 and failed.code != 429
                if refused or time.monotonic() > until:
                    raise LearnerError(f"{OPTION} {self._address}: {name}: {_said(failed)}") from failed
                time.sleep(PAUSE_S)


def _joined(asked: Sequence["Future[NDArray[np.float32]]"], batch: MicroBatch) -> Any:
    import torch

    found = [one.result() for one in asked]
    joined = np.concatenate(found) if found else np.empty(0, np.float32)
    return torch.from_numpy(joined).to(batch.targets_N.device)


def _answer(url: str, asked: Mapping[str, Any] | None) -> Any:
    body = None if asked is None else json.dumps(asked).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with _opener.open(request, timeout=ANSWER_S if asked else 30.0) as answer:
        return json.load(answer)


def _said(failed: Exception) -> str:
    """One line; of an HTTP error also what the server wrote."""
    text = f"{type(failed).__name__}: {failed}"
    if isinstance(failed, urllib.error.HTTPError):
        text += f": {failed.read(300).decode(errors='replace')}"
    return " ".join(text.split())[:300]
