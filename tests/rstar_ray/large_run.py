"""A long run as a directory: 500 steps, and trajectories of thousands of tokens, written in seconds."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rstar_ray.fabricate import run_directory

CHUNK_TOKENS = 256
STEPS_BETWEEN, SIBLINGS = 10, 8
LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


@dataclass(frozen=True)
class Chunk:
    """A piece of text, and what is recorded of its tokens as the inside of a JSON list."""

    text: str
    ids: str
    counts: str
    logprobs: str
    entropies: str
    diffs: str


class Chunks:
    """Many of them, each rendered once."""

    def __init__(self, rng: random.Random, count: int) -> None:
        words = ["".join(rng.choices(LETTERS, range(26, 0, -1), k=rng.randint(2, 8))) for _ in range(30_000)]
        weights = [1 / (rank + 2) for rank in range(len(words))]
        drawn = (rng.choices(range(len(words)), weights, k=CHUNK_TOKENS) for _ in range(count))
        self._chunks = [self._chunk(rng, ids, words) for ids in drawn]

    def _chunk(self, rng: random.Random, ids: list[int], words: list[str]) -> Chunk:
        pieces = [f"{words[one]} " for one in ids]
        logprobs = [round(-rng.expovariate(2.0 if rng.random() < 0.3 else 200.0), 4) for _ in ids]
        counts = [len(piece) for piece in pieces]
        entropies = [float(f"{rng.expovariate(3.0):.3g}") for _ in ids]
        diffs = [float(f"{rng.gauss(0, 5e-3):.3g}") for _ in ids]
        columns = (ids, counts, logprobs, entropies, diffs)
        return Chunk("".join(pieces), *(json.dumps(one)[1:-1] for one in columns))

    def turn(self, rng: random.Random, tokens: int, *, call: bool, trained: bool) -> str:
        """One turn as JSON; what ends it, a call or an answer, is one token more; `trained` has what was seen."""
        chosen = rng.choices(self._chunks, k=tokens // CHUNK_TOKENS)
        code = f"total = 0\nfor n in range({rng.randint(2, 99)}):\n    total += n\nprint(total)"
        program = json.dumps({"name": "python", "arguments": {"code": code}})
        end = f"<tool_call>\n{program}\n</tool_call><|im_end|>" if call else "<answer>\\boxed{7}</answer><|im_end|>"
        answered = f"<tool_response>\n{rng.randint(0, 999)}\n</tool_response>" if call else None
        columns = {
            "completion_ids": [*(one.ids for one in chosen), "7"],
            "token_chars": [*(one.counts for one in chosen), str(len(end))],
            "logprobs": [*(one.logprobs for one in chosen), "-0.01"],
        }
        if trained:
            columns["entropies"] = [*(one.entropies for one in chosen), "0.5"]
            columns["logprob_diffs"] = [*(one.diffs for one in chosen), "-0.001"]
        facts = {
            "completion": "".join(one.text for one in chosen) + end, "tool_response": answered, "tool_ids": [],
            "outcomes": [rng.choice(("ok", "ok", "error"))] if call else [], "num_tokens": tokens + 1,
            "policy_versions": [3], "version_runs": [[3, tokens + 1]], "generate_s": round(rng.uniform(1, 40), 3),
            "tool_s": round(rng.uniform(0, 2), 3),
        } | ({} if trained else {"entropies": None, "logprob_diffs": None})  # fmt: skip
        lists = ", ".join(f'"{name}": [{", ".join(parts)}]' for name, parts in columns.items())
        return f"{json.dumps(facts)[:-1]}, {lists}}}"


def large_run(path: Path, *, steps: int = 500, trajectories: int = 2_000, tokens: int = 8_192) -> Path:
    """Every tenth step is recorded, in groups of eight siblings; the ledger has 256 rollouts a step."""
    rng = random.Random(0)
    run_directory(path, stages={"stage1": steps * 2 // 5, "stage2": steps * 3 // 10, "stage3": steps - steps * 7 // 10})
    for file in (path / "trajectories").iterdir():
        file.unlink()
    places = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines() if "reward_mean" in line]
    with (path / "ledger.jsonl").open("w") as ledger:
        ledger.writelines(map(_ledger_row, places))
    recorded = [row for row in places if row["step"] % STEPS_BETWEEN == 0]
    chunks, each = Chunks(rng, 1_500), trajectories // len(recorded)
    for row in recorded:
        name = f"{row['stage']}-step-{row['step']:06d}.jsonl"
        with (path / "trajectories" / name).open("w") as file:
            file.writelines(_rows(rng, chunks, row["stage"], row["step"], each, tokens))
    return path


def _ledger_row(row: dict[str, Any]) -> str:
    first = row["step"] * 7
    names = [f"{group}-problem-{first + group:06x}-0/{sibling}" for group in range(32) for sibling in range(8)]
    ids = {"trained": names[::4], "resampled_away": names[1::2], "in_equal_groups": names[2::4]}
    ids |= {"left_out": [], "dropped": []}
    counts = {status: len(of) for status, of in ids.items()}
    row_written = {"stage": row["stage"], "step": row["step"], "rollouts": 256, **counts, "ids": ids, "reasons": {}}
    return json.dumps(row_written | {"advantages": dict.fromkeys(ids["trained"], 0.5)}) + "\n"


def _rows(rng: random.Random, chunks: Chunks, stage: str, step: int, count: int, tokens: int) -> Iterator[str]:
    for number in range(count):
        group, sibling = divmod(number, SIBLINGS)
        name = f"problem-{step * 7 + group:06x}-0"
        turns = [chunks.turn(rng, tokens // 4, call=turn < 3, trained=sibling % 4 == 0) for turn in range(4)]
        failed = sum('"outcomes": ["error"]' in turn for turn in turns)
        facts = {
            "stage": stage, "step": step, "rollout_id": f"{stage}/{step}/{group}-{name}/{sibling}",
            "group_id": f"{stage}/{step}/{group}-{name}", "problem_id": name, "problem": f"What is {name}?",
            "answer": "7", "family": "made up", "difficulty": 1.0, "reward": float(rng.random() < 0.6),
            "stop_reason": "answered", "num_calls": 3, "num_failed": failed, "num_answers": 1,
            "num_response_tokens": tokens, "verify_s": 0.01, "restarts": 0, "judge_retries": 0, "placements": [],
            "prompt": "<|im_start|>user", "prompt_ids": [1, 2],
        }  # fmt: skip
        yield f'{json.dumps(facts)[:-1]}, "turns": [{", ".join(turns)}]}}\n'
