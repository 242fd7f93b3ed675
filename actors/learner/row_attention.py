"""Attention over rows packed end to end: causal within each row, none across rows, no padding.

On NVIDIA GPUs torch's `varlen_attn` (flash attention) takes all rows in one call. Elsewhere, and in float32, which
flash attention does not support, `scaled_dot_product_attention` takes adjacent rows of equal length at a time. ROCm
uses the latter: `varlen_attn` is not tested there.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

NAME = "rows"


@dataclass(frozen=True, slots=True)
class Heads:
    """Inputs of an attention layer: H query heads and K key/value heads, T tokens, head dimension D."""

    query_BHTD: Tensor
    key_BKTD: Tensor
    value_BKTD: Tensor


def attend_rows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Transformers' attention interface; `mask` is always None, see `_no_mask`."""
    return attend(Heads(query, key, value), **options), None


def attend(
    heads: Heads,
    *,
    row_lengths: tuple[int, ...] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> Tensor:
    """PyTorch's fused attention; returns [B, T, H, D].

    With `row_lengths`, which sum to T, B is 1. Without them, each batch entry is one row.
    """
    if row_lengths is not None and not dropout and has_varlen(heads.query_BHTD):
        return attend_varlen(heads, row_lengths, scaling=scaling, sliding_window=sliding_window)
    grouped = heads.query_BHTD.shape[1] != heads.key_BKTD.shape[1]

    def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        window = _window(query, sliding_window)
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=window,
            is_causal=window is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=grouped,
        )

    all_heads = (heads.query_BHTD, heads.key_BKTD, heads.value_BKTD)
    if row_lengths is None:
        return fused(*all_heads).transpose(1, 2).contiguous()
    runs = [(length, len(list(same))) for length, same in groupby(row_lengths)]
    if len(runs) == 1:
        return _as_line(fused(*(_as_rows(part, runs[0][1]) for part in all_heads)))
    sizes = [length * count for length, count in runs]
    parts = zip(*(part.split(sizes, dim=2) for part in all_heads), strict=True)
    lines = [
        _as_line(fused(*(_as_rows(part, count) for part in run))) for run, (_, count) in zip(parts, runs, strict=True)
    ]
    return torch.cat(lines, dim=1)


def has_varlen(query: Tensor) -> bool:
    """Whether `varlen_attn` supports it: half precision on an NVIDIA GPU."""
    return query.is_cuda and torch.version.hip is None and query.dtype in (torch.bfloat16, torch.float16)


def attend_varlen(
    heads: Heads, row_lengths: tuple[int, ...], *, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """All packed rows in one call; returns [1, T, H, D]."""
    query_THD, key_TKD, value_TKD = (
        part.squeeze(0).transpose(0, 1).contiguous() for part in (heads.query_BHTD, heads.key_BKTD, heads.value_BKTD)
    )
    starts, longest = _row_starts(row_lengths, query_THD.device), max(row_lengths)
    # (-1, 0) is plain causal attention. A window of n tokens includes the query token itself: n - 1 to its left.
    window = (-1, 0) if sliding_window is None or longest <= sliding_window else (sliding_window - 1, 0)
    out: Any = varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        starts,
        starts,
        longest,
        longest,
        scale=scaling,
        window_size=window,
        enable_gqa=query_THD.shape[1] != key_TKD.shape[1],
    )
    return out.unsqueeze(0)


@lru_cache(maxsize=8)
def _row_starts(row_lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Cumulative row lengths, int32 [rows + 1]; cached, since every layer of a pass uses the same."""
    return torch.tensor([0, *accumulate(row_lengths)], dtype=torch.int32, device=device)


def _as_rows(part_1HTD: Tensor, count: int) -> Tensor:
    """[1, H, count * L, D] to [count, H, L, D]."""
    _, heads, length, size = part_1HTD.shape
    return part_1HTD.view(heads, count, length // count, size).transpose(0, 1) if count > 1 else part_1HTD


def _as_line(rows_NHLD: Tensor) -> Tensor:
    """[N, H, L, D] to [1, N * L, H, D]."""
    return rows_NHLD.transpose(1, 2).flatten(0, 1).unsqueeze(0)


def _window(query_BHTD: Tensor, sliding_window: int | None) -> Tensor | None:
    """Sliding-window causal mask, bool [T, T]; None if the window covers the whole row."""
    length = query_BHTD.shape[2]
    if sliding_window is None or length <= sliding_window:
        return None
    position = torch.arange(length, device=query_BHTD.device)
    behind = position[:, None] - position[None, :]
    return (behind >= 0) & (behind < sliding_window)


def register() -> str:
    """Register this attention with transformers; returns the name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend_rows)  # type: ignore[arg-type]
    AttentionMaskInterface.register(NAME, _no_mask)
    return NAME


def _no_mask(*_: Any, **__: Any) -> None:
    return None
