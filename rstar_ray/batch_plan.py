"""Which rows an update's ranks take and how they are cut into micro batches under a token budget.

The plan is made once, by whoever has the lengths, and is a pure function of them: every rank gets the
same number of micro batches, so that ranks meet in every collective.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How micro batches are cut.

    `overhead_tokens` is what one more micro batch costs, in tokens of padding that would cost as much:
    it trades padding against the number of passes.
    """

    micro_batch_tokens: int = 2_048  # padded tokens of a micro batch; one longer row gets a micro batch of its own
    overhead_tokens: int = 64
    attention_tokens: float = float("inf")  # length at which attention costs as much as the rest of the model


def row_work(length: int, attention_tokens: float) -> float:
    """Work of a row in tokens of a short row: linear in its length, plus attention's square."""
    return length * (1.0 + length / attention_tokens)


def plan_ranks(lengths: Sequence[int], world_size: int, limits: BatchLimits) -> list[list[list[int]]]:
    """Row indices by rank and micro batch: balanced by work, reproducible, as many micro batches on every rank.

    A rank that would have fewer cuts its largest micro batches in two; with too few rows for that it
    gets empty ones.
    """
    by_rank = [cut(lengths, indices, limits) for indices in balance(lengths, world_size, limits.attention_tokens)]
    most = max(len(batches) for batches in by_rank)
    for batches in by_rank:
        while len(batches) < most:
            largest = max(range(len(batches)), key=lambda i: len(batches[i]), default=None)
            if largest is None or len(batches[largest]) < 2:
                batches.append([])
                continue
            whole = batches[largest]
            batches[largest : largest + 1] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    return by_rank


def balance(lengths: Sequence[int], world_size: int, attention_tokens: float) -> list[list[int]]:
    """Row indices of each rank: the row with most work left goes to the rank with least work so far."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0.0, rank) for rank in range(world_size)]
    for index in order:
        work, rank = heapq.heappop(loads)
        ranks[rank].append(index)
        heapq.heappush(loads, (work + row_work(lengths[index], attention_tokens), rank))
    return ranks


def cut(lengths: Sequence[int], indices: Sequence[int], limits: BatchLimits) -> list[list[int]]:
    """Micro batches of rows next to each other in length, longest first, with the least padding.

    Exact: over all cuts of the sorted rows, the least sum of padded tokens plus `overhead_tokens` a cut.
    """
    order = sorted(indices, key=lambda i: (-lengths[i], i))
    sizes = np.array([lengths[i] for i in order], np.int64)
    best = np.zeros(len(order) + 1, np.int64)  # best[i]: least cost of the rows from i on
    end = np.zeros(len(order), np.int64)
    for start in range(len(order) - 1, -1, -1):
        most_rows = max(1, limits.micro_batch_tokens // max(int(sizes[start]), 1))
        stop = min(start + most_rows, len(order))
        costs = np.arange(1, stop - start + 1) * sizes[start] + best[start + 1 : stop + 1]
        chosen = int(np.argmin(costs))
        best[start] = costs[chosen] + limits.overhead_tokens
        end[start] = start + chosen + 1
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        batches.append(order[start : int(end[start])])
        start = int(end[start])
    return batches


def padding_waste(lengths: Sequence[int], plan: Sequence[Sequence[Sequence[int]]]) -> float:
    """Share of padded tokens that are padding, over all ranks and micro batches."""
    padded = used = 0
    for batches in plan:
        for batch in batches:
            padded += len(batch) * max((lengths[i] for i in batch), default=0)
            used += sum(lengths[i] for i in batch)
    return 1.0 - used / padded if padded else 0.0
