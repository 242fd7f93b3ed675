"""Rows end to end attend as they would alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from actors.learner import row_attention
from actors.learner.row_attention import Heads, attend_rows, attend_varlen

LENGTHS = (5, 7, 7, 7, 1, 12, 12)


def heads(number: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, number, sum(LENGTHS), 8, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("window", [None, 4])
def test_no_row_sees_another_and_none_sees_ahead(window: int | None):
    """Against one dense attention whose mask is written out, values and gradients."""
    query, key, value = heads(4, 0), heads(2, 1), heads(2, 2)
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(sum(LENGTHS))
    behind = place[:, None] - place[None, :]
    seen = (row[:, None] == row[None, :]) & (behind >= 0) & (behind < (window or 100))
    dense = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3, enable_gqa=True)
    ours, _ = attend_rows(None, query, key, value, None, row_lengths=LENGTHS, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(ours, dense.transpose(1, 2))
    direction = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = torch.autograd.grad((dense.transpose(1, 2) * direction).sum(), (query, key, value))
    found = torch.autograd.grad((ours * direction).sum(), (query, key, value))
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)


def test_without_lengths_each_line_is_a_row():
    query = torch.randn(3, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    ours, _ = attend_rows(None, query, query, query, None)
    torch.testing.assert_close(ours, scaled_dot_product_attention(query, query, query, is_causal=True).transpose(1, 2))


def documented_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, *,
    scale: float | None, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """What torch documents of `varlen_attn`, row by row: [T, H, D]; its kernel is for GPUs alone."""
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q.tolist() == cu_seq_k.tolist()
    rows: list[Tensor] = []
    for first, last in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:], strict=False):
        assert last - first <= min(max_q, max_k)
        place = torch.arange(last - first)
        behind = place[:, None] - place[None, :]
        left, right = (last if side < 0 else side for side in window_size)
        seen = (behind <= left) & (-behind <= right)
        parts = (part[first:last].transpose(0, 1) for part in (query, key, value))
        row = scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        rows.append(row.transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("window", [None, 4, 12])
def test_all_rows_in_one_call_attend_as_row_by_row(window: int | None, monkeypatch: pytest.MonkeyPatch):
    """The arguments of `varlen_attn`: starts of rows, window, groups of heads."""
    monkeypatch.setattr(row_attention, "varlen_attn", documented_varlen_attn)
    query, key, value = heads(4, 0), heads(2, 1), heads(2, 2)
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window}
    by_row, _ = attend_rows(None, query, key, value, None, row_lengths=LENGTHS, **options)
    at_once = attend_varlen(Heads(query, key, value), LENGTHS, **options)
    torch.testing.assert_close(at_once, by_row)
