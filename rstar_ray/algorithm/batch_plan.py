"""Assigns a step's rows to updates and ranks, and cuts them into micro batches under a token budget.

The plan is computed once, as a pure function of the rows' lengths. Every rank gets the same number of micro
batches, so that ranks meet in every collective.
"""

import heapq
from collections.abc import Sequence
from math import inf

import numpy as np

from rstar_ray.config import LearnerConfig

NO_SAMPLED_TOKEN = "no sampled token"
"""The reason for a row that is excluded before rows are assigned to updates."""
ABOVE_CONTEXT = "above the model's context of"
"""In the reason for a row that is longer than the model's context; the number of tokens follows."""


def updates_of_groups(tokens_R: Sequence[int], groups_R: Sequence[str], num_updates: int) -> list[list[int]]:
    """Row indices of each update: at most `num_updates` updates of whole prompt groups, balanced by tokens.

    Groups are not split: advantages sum to 0 only over a whole group, and `--algorithm.normalisation group` divides by
    the tokens of a whole group. Within an update the rows keep their order.
    """
    groups: dict[str, list[int]] = {}
    for index, group in enumerate(groups_R):
        groups.setdefault(group, []).append(index)
    members = list(groups.values())
    tokens = [sum(tokens_R[index] for index in group) for group in members]
    parts = balance(tokens, range(len(members)), min(num_updates, len(members)), attention_tokens=inf)
    return [sorted(index for group in part for index in members[group]) for part in parts]


def row_work(length: int, attention_tokens: float) -> float:
    """Work of a row in tokens of a short row: linear in its length, plus attention's square."""
    return length * (1.0 + length / attention_tokens)


def plan_ranks(lengths: Sequence[int], learner: LearnerConfig, *, attention_tokens: float) -> list[list[list[int]]]:
    """Row indices by rank and micro batch: balanced by work, reproducible, as many micro batches on every rank.

    A rank that would have fewer cuts its largest micro batches in two; with too few rows for that it
    gets empty ones. At a length of `attention_tokens` attention costs as much as the rest of the model.
    """
    shares = balance(lengths, range(len(lengths)), learner.ranks, attention_tokens)
    by_rank = [cut(lengths, indices, learner) for indices in shares]
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


def balance(lengths: Sequence[int], indices: Sequence[int], parts: int, attention_tokens: float) -> list[list[int]]:
    """`indices` in even parts: the row with the most work goes to the part with the least work so far."""
    order = sorted(indices, key=lambda i: (-lengths[i], i))
    found: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for index in order:
        work, part = heapq.heappop(loads)
        found[part].append(index)
        heapq.heappush(loads, (work + row_work(lengths[index], attention_tokens), part))
    return found


def cut(lengths: Sequence[int], indices: Sequence[int], learner: LearnerConfig) -> list[list[int]]:
    """Micro batches of rows next to each other in length, longest first.

    Padding is traded against passes at `pass_tokens` a pass, or at the largest half, quarter, ...
    of it that keeps padding within `max_padding`.
    """
    if learner.packed:
        return fill(lengths, indices, learner.micro_batch_tokens)
    order = sorted(indices, key=lambda i: (-lengths[i], i))
    overhead = learner.pass_tokens
    while True:
        batches = cheapest_cut([lengths[i] for i in order], learner.micro_batch_tokens, overhead)
        planned = [[order[i] for i in batch] for batch in batches]
        if overhead == 0 or padding_waste(lengths, [planned]) <= learner.max_padding:
            return planned
        overhead //= 2


def fill(lengths: Sequence[int], indices: Sequence[int], max_tokens: int) -> list[list[int]]:
    """As few packed micro batches as even filling allows, fullest first; a row above `max_tokens` gets one to
    itself.
    """
    count = max(1, -(-sum(lengths[i] for i in indices) // max_tokens))
    while True:
        parts = [part for part in balance(lengths, indices, count, inf) if part]
        if all(len(part) == 1 or sum(lengths[i] for i in part) <= max_tokens for part in parts):
            return parts
        count += 1


def cheapest_cut(descending: Sequence[int], max_tokens: int, overhead: int) -> list[range]:
    """The cut of sorted lengths with the smallest sum of padded tokens and `overhead` per part, exactly.

    A part holds at most `max_tokens` padded tokens, or one length.
    """
    sizes = np.array(descending, np.int64)
    best = np.zeros(len(sizes) + 1, np.int64)  # best[i]: least cost of the lengths from i on
    end = np.zeros(len(sizes), np.int64)
    for start in range(len(sizes) - 1, -1, -1):
        most = max(1, max_tokens // max(int(sizes[start]), 1))
        stop = min(start + most, len(sizes))
        costs = np.arange(1, stop - start + 1) * sizes[start] + best[start + 1 : stop + 1]
        chosen = int(np.argmin(costs))
        best[start] = costs[chosen] + overhead
        end[start] = start + chosen + 1
    parts: list[range] = []
    start = 0
    while start < len(sizes):
        parts.append(range(start, int(end[start])))
        start = int(end[start])
    return parts


def padding_waste(lengths: Sequence[int], plan: Sequence[Sequence[Sequence[int]]]) -> float:
    """Share of padded tokens that are padding, over all ranks and micro batches."""
    padded = used = 0
    for batches in plan:
        for batch in batches:
            padded += len(batch) * max((lengths[i] for i in batch), default=0)
            used += sum(lengths[i] for i in batch)
    return 1.0 - used / padded if padded else 0.0
