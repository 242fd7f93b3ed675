"""What keeping turns costs a worker, as one JSON line: `python -m benchmarks.keeping`.

Looks: so many rollouts are under way, and each has a few tokens more than at the look before. Turns: some end.
CPU time of the event loop's thread, where agent loops run too; and of a driver that reads all of it again.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from actors.generation import kept_turns
from actors.generation.kept_turns import KeptTurns
from actors.generation.under_way import Sampled
from rstar_ray.agent.journal import TurnJournal, journaled
from rstar_ray.agent.rollout import RolloutState
from rstar_ray.errors import EngineError
from rstar_ray.trajectory import Completion, Problem, RolloutLimits, RolloutRequest, Sampling, Turn

VERSION, WEIGHTS = 1, 7
VOCABULARY = 150_000


class Looks:
    """An engine that tells what was made ready, and is gone then."""

    def __init__(self, rollout_ids: list[str], looks: int, tokens: int) -> None:
        self.looks: Iterator[dict[str, Sampled]] = iter(
            [
                {f"{name}/turn-0": Sampled(look * tokens, completion(tokens)) for name in rollout_ids}
                for look in range(looks)
            ]
        )

    def newly_sampled(self) -> dict[str, Sampled]:
        try:
            return next(self.looks)
        except StopIteration:
            raise EngineError("all was told") from None


def completion(tokens: int) -> Completion:
    ids = [(7919 * i) % VOCABULARY for i in range(tokens)]
    return Completion(
        token_ids=ids, logprobs=[-1.0 / (1 + i) for i in ids], policy_versions=[VERSION] * tokens, ended=False
    )


def start(number: int) -> RolloutState:
    limits = RolloutLimits(max_response_tokens=16_384, max_turns=10, max_context_tokens=20_480, max_calls_per_turn=5)
    request = RolloutRequest(
        rollout_id=f"stage1/1/{number}-problem/0",
        group_id=f"stage1/1/{number}-problem",
        problem=Problem(id="problem", problem="?", answer="1"),
        seed=number,
        limits=limits,
        sampling=Sampling(temperature=1.0, top_p=1.0),
    )
    return RolloutState.start(request, list(range(500)))


def ended(state: RolloutState, whole: Completion) -> RolloutState:
    tokens = len(whole.token_ids)
    return replace(
        state,
        response_ids=whole.token_ids,
        loss_mask=[True] * tokens,
        logprobs=whole.logprobs,
        policy_versions=whole.policy_versions,
        turns=(Turn(num_tokens=tokens),),
    )


async def measure(
    folder: Path, *, rollouts: int, looks: int, per_look: int, turns: int, tokens: int
) -> dict[str, float]:
    every_s, share = kept_turns.KEEP_EVERY_S, kept_turns.KEEP_SHARE
    kept_turns.KEEP_EVERY_S, kept_turns.KEEP_SHARE = 0.0, 1e9  # one look after the other
    starts = {state.request.rollout_id: state for state in map(start, range(rollouts))}
    kept = KeptTurns(TurnJournal(folder, "bench"))
    kept.serve(VERSION, WEIGHTS)
    for state in starts.values():
        kept.begin(state)
    engine = Looks([*starts], looks, per_look)
    began_s = time.thread_time()
    await kept.keep(engine)
    look_s = (time.thread_time() - began_s) / looks
    under_way = size(folder)
    whole, ending = completion(tokens), list(starts.values())[:turns]
    ends = [ended(state, whole) for state in ending]
    began_s = time.thread_time()
    for state in ends:
        kept.finished(state)
    turn_s = (time.thread_time() - began_s) / turns
    await kept.close()
    began_s = time.thread_time()
    found = journaled(folder, ending, WEIGHTS)
    read_s = time.thread_time() - began_s
    assert len(found) == turns and all(len(state.response_ids) == tokens for state in found.values())
    interval_s = max(every_s, look_s / share)
    return {
        "look_ms": round(1e3 * look_s, 3),
        "looks_every_s": round(interval_s, 3),
        "share_of_a_core": round(look_s / interval_s, 4),
        "bytes_a_token_under_way": round(under_way / (rollouts * looks * per_look), 1),
        "turn_ms": round(1e3 * turn_s, 3),
        "bytes_a_token_finished": round((size(folder) - under_way) / (turns * tokens), 1),
        "read_us_a_token": round(1e6 * read_s / (turns * tokens), 3),
    }


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.turns"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=256, help="under way at one worker")
    parser.add_argument("--looks", type=int, default=50)
    parser.add_argument("--per-look", type=int, default=2, help="tokens of each rollout: 20 a second, every 0.1 s")
    parser.add_argument("--turns", type=int, default=32, help="that end")
    parser.add_argument("--tokens", type=int, default=16_384, help="of each of them")
    asked = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), **asked))
    print(json.dumps({**asked, **found}))


if __name__ == "__main__":
    main()
