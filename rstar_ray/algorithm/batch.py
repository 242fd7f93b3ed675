"""Training rows, and micro batches of them as tensors (`batch_plan` decides which rows share a micro batch).

Legend: B rows of a micro batch, T padded length, L a row's own length, N sampled tokens of a micro batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rstar_ray.algorithm.advantage import Advantage
from rstar_ray.algorithm.update import SftExample
from rstar_ray.lines import lines_with_loss
from rstar_ray.trajectory import Trajectory

LANES = 16
"""Keys per attention kernel call; on a CPU the rest of a row is computed one by one, at several times the cost."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row to train on; a plain numpy view of a trajectory or a conversation."""

    name: str  # rollout id or dataset row, for error messages
    token_ids: NDArray[np.int32]  # [L]
    loss_mask: NDArray[np.bool_]  # [L] True where the loss applies
    advantage: Advantage = 1.0  # one for all tokens with a loss, or [their number]
    rollout_logprobs: NDArray[np.float32] | None = None  # [L] from the engine; None for SFT
    token_weight: float = 1.0  # weight of each sampled token's loss in the update, from `token_weights`

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens with a loss. Nothing predicts the first token, so it never counts."""
        return int(self.loss_mask[1:].sum())

    def trimmed(self) -> "TokenRow":
        """The row without the tokens after the last one with a loss: they do not affect the gradient."""
        where = np.flatnonzero(self.loss_mask)
        length = int(where[-1]) + 1 if len(where) else min(len(self.token_ids), 2)
        if length == len(self.token_ids):
            return self
        logprobs = None if self.rollout_logprobs is None else self.rollout_logprobs[:length]
        return replace(
            self, token_ids=self.token_ids[:length], loss_mask=self.loss_mask[:length], rollout_logprobs=logprobs
        )


def rl_row(trajectory: Trajectory, advantage: Advantage, token_weight: float, line: int = 0) -> TokenRow:
    """A trajectory as one row: the prompt, without loss, then the response.

    Of a trajectory with several lines, one line. A token shared by several lines has its loss in the first of
    them.
    """
    num_prompt = len(trajectory.prompt_ids)
    token_ids = np.concatenate([trajectory.prompt_ids, trajectory.response_ids]).astype(np.int32, copy=False)
    loss_mask = np.concatenate([np.zeros(num_prompt, np.bool_), trajectory.loss_mask])
    logprobs = np.concatenate([np.zeros(num_prompt, np.float32), trajectory.rollout_logprobs])
    name = trajectory.summary.rollout_id
    if trajectory.summary.lines:
        of_token = np.zeros(len(token_ids), np.float32)
        of_token[loss_mask] = advantage
        places, loss_mask = lines_with_loss(trajectory.turns, trajectory.loss_mask, num_prompt)[line]
        name = f"{name} line {line}"
        advantage = of_token[places][loss_mask] if isinstance(advantage, np.ndarray) else advantage
        token_ids, logprobs = token_ids[places], np.where(loss_mask, logprobs[places], 0).astype(np.float32)
    return TokenRow(name, token_ids, loss_mask, advantage, logprobs, token_weight).trimmed()


def sft_row(example: SftExample, token_weight: float) -> TokenRow:
    """A conversation as one row."""
    return TokenRow(example.name, example.token_ids, example.loss_mask, token_weight=token_weight).trimmed()


# ---------------------------------------------------------------- one micro batch as tensors


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded, or packed into one line, with the sampled tokens of all rows laid end to end."""

    input_ids_BT: Tensor  # int64; without a row's last token, which predicts nothing, unless it fills a lane
    position_ids_BT: Tensor | None  # set where rows are packed into one: each starts at 0
    row_lengths: tuple[int, ...] | None  # of the packed rows, in their order; adds up to T
    positions_N: Tensor  # int64: where in the flattened input the token before each sampled token lies
    targets_N: Tensor  # int64
    advantages_N: Tensor  # float32
    weights_N: Tensor  # float32, from each row's `token_weight`
    rollout_logprobs_N: Tensor  # float32; 0 for SFT
    rows_N: Tensor  # int64: the row of each sampled token
    num_input_tokens: int  # without padding

    @property
    def num_padded_tokens(self) -> int:
        return self.input_ids_BT.numel()

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on another device."""
        return MicroBatch(
            self.input_ids_BT.to(device),
            None if self.position_ids_BT is None else self.position_ids_BT.to(device),
            self.row_lengths,
            self.positions_N.to(device),
            self.targets_N.to(device),
            self.advantages_N.to(device),
            self.weights_N.to(device),
            self.rollout_logprobs_N.to(device),
            self.rows_N.to(device),
            self.num_input_tokens,
        )


def collate(rows: Sequence[TokenRow], *, packed: bool = False) -> MicroBatch:
    """Rows, padded on the right with token 0, as one micro batch.

    Padding needs no attention mask: attention is causal, so nothing before it can see it. `packed`
    lays the rows end to end in one line of positions that start again at 0, for attention that
    understands them. Without rows, or with rows without a loss: one token and N = 0, so that a rank can
    take part in a pass with nothing to add.
    """
    used = [row for row in rows if len(row.token_ids) > 1]
    lines = _lines(used, packed)
    # A sampled token at place p of its row is predicted from the input at place p - 1.
    places = [np.flatnonzero(row.loss_mask[1:]) for row in used]
    rows_N = np.repeat(np.arange(len(used), dtype=np.int64), np.array([len(p) for p in places], np.int64))
    targets = [row.token_ids[1:][p] for row, p in zip(used, places, strict=True)]
    logprobs = [
        np.zeros(len(p), np.float32) if row.rollout_logprobs is None else row.rollout_logprobs[1:][p]
        for row, p in zip(used, places, strict=True)
    ]
    advantages = [np.broadcast_to(row.advantage, len(p)) for row, p in zip(used, places, strict=True)]
    row_of_token = torch.from_numpy(rows_N)
    return MicroBatch(
        input_ids_BT=torch.from_numpy(lines.input_ids),
        position_ids_BT=torch.from_numpy(lines.position_ids) if packed and used else None,
        row_lengths=tuple(lines.lengths.tolist()) if packed and used else None,
        positions_N=torch.from_numpy(lines.offsets[rows_N] + _joined(places, np.int64)),
        targets_N=torch.from_numpy(_joined(targets, np.int64)),
        advantages_N=torch.from_numpy(_joined(advantages, np.float32)),
        weights_N=torch.tensor([row.token_weight for row in used], dtype=torch.float32)[row_of_token],
        rollout_logprobs_N=torch.from_numpy(_joined(logprobs, np.float32)),
        rows_N=row_of_token,
        num_input_tokens=int(lines.lengths.sum()),
    )


@dataclass(frozen=True, slots=True)
class _RowLines:
    """Where rows lie in the model's input."""

    input_ids: NDArray[np.int64]  # [B, T]
    position_ids: NDArray[np.int64]  # [B, T] places within the row
    offsets: NDArray[np.int64]  # [R] where each row starts in the flattened input
    lengths: NDArray[np.int64]  # [R] of the input


def _lines(rows: Sequence[TokenRow], packed: bool) -> _RowLines:
    """The last token predicts nothing and is left out, unless it fills up the lanes."""
    inputs = [row.token_ids if len(row.token_ids) % LANES == 0 else row.token_ids[:-1] for row in rows]
    lengths = np.array([len(ids) for ids in inputs], np.int64)
    if not inputs:
        empty = np.zeros((1, 1), np.int64)
        return _RowLines(empty, empty, np.zeros(0, np.int64), lengths)
    if packed:
        places = np.concatenate([np.arange(length) for length in lengths])
        return _RowLines(_joined(inputs, np.int64)[None], places[None], np.cumsum(lengths) - lengths, lengths)
    width = int(lengths.max())
    input_ids = np.zeros((len(inputs), width), np.int64)
    for row, ids in enumerate(inputs):
        input_ids[row, : len(ids)] = ids
    places = np.broadcast_to(np.arange(width), input_ids.shape)
    return _RowLines(input_ids, places, np.arange(len(inputs), dtype=np.int64) * width, lengths)


def _joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """The arrays end to end, with this dtype even where there is none."""
    return np.concatenate([*parts, np.zeros(0, dtype)]).astype(dtype, copy=False)
