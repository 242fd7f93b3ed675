"""Rollouts, draws, duplicates and evaluations at their edges."""

import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from rstar_ray.agent.rollout import MAX_ANSWER_CHARS, RolloutState, play_turn, run_rollout, score
from rstar_ray.data.order import DataPosition, draw
from rstar_ray.data.overlap import (
    _jaccard,
    _meeting,
    _shingles,
    near_duplicates,
    numbers_of,
    shared_with,
    tokens,
    words,
)
from rstar_ray.evaluation.figures import bootstrap_interval, bootstrap_ratio, evaluate
from rstar_ray.reward.judge import Judgement
from rstar_ray.rollouts import (
    DroppedRollout,
    FinishedRollout,
    TrajectoryRef,
    roll_out,
    sibling_requests,
    whole_groups,
)
from rstar_ray.seeds import derive_seed
from rstar_ray.trajectory import (
    Completion,
    Problem,
    RolloutLimits,
    RolloutRequest,
    Sampling,
    StopReason,
    ToolCall,
    ToolResult,
)
from tests.fakes import AddingSandbox, CharChat, ScriptedEngine, answer, call, request
from tests.rstar_ray.fabricate import results_of, summary

# -- one rollout -------------------------------------------------------------------------------------------------------

CHAT = CharChat()
PROMPT = len(CHAT.prompt_ids(request().problem))


def limits(response: int = 400, turns: int = 4, context: int = 1_000) -> RolloutLimits:
    return RolloutLimits(
        max_response_tokens=response, max_turns=turns, max_context_tokens=context, max_calls_per_turn=16
    )


def begin(**more: int) -> RolloutState:
    wanted = request(limits=limits(**more))
    return RolloutState.start(wanted, CHAT.prompt_ids(wanted.problem))


async def play(completions: Sequence[str], **more: int) -> RolloutState:
    engine = ScriptedEngine(list(completions))
    return await run_rollout(begin(**more), generate=engine, execute=AddingSandbox(), chat=CHAT)


def test_the_room_is_the_smaller_of_budget_and_context():
    assert begin(response=30, context=PROMPT + 50).room_tokens == 30
    assert begin(response=30, context=PROMPT + 20).room_tokens == 20
    assert begin(context=PROMPT + 1).stop_reason is None
    assert begin(context=PROMPT).stop_reason is StopReason.REFUSED


async def test_the_engine_is_asked_with_the_room_that_is_left_and_a_seed_for_each_turn():
    asked: list[tuple[str, int, int]] = []
    said = iter([call("1+2"), answer("3")])

    async def generate(
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        max_tokens: int,
        seed: int,
        sampling: Sampling,
        begun: Completion | None = None,
    ) -> Completion:
        asked.append((request_id, max_tokens, seed))
        ids = [ord(letter) for letter in next(said)]
        return Completion(token_ids=ids, logprobs=[-1.0] * len(ids), policy_versions=[4] * len(ids), ended=True)

    state = await run_rollout(begin(), generate=generate, execute=AddingSandbox(), chat=CHAT)
    wanted = state.request
    used = len(call("1+2")) + len("\nT:3\nA:")
    assert asked == [
        (f"{wanted.rollout_id}/turn-0", 400, derive_seed(wanted.seed, "turn", 0)),
        (f"{wanted.rollout_id}/turn-1", 400 - used, derive_seed(wanted.seed, "turn", 1)),
    ]
    assert state.num_answers == 1 and len(state.response_ids) == used + len(answer("3"))


async def test_a_tools_text_must_leave_room_for_a_token():
    used = len(call("1+2")) + 1 + len("\nT:3\nA:")
    short = await play([call("1+2"), answer("3")], response=used)
    assert (short.stop_reason, len(short.response_ids)) == (StopReason.TRUNCATED, len(call("1+2")) + 1)
    longer = await play([call("1+2"), answer("3")], response=used + 1)
    assert (longer.stop_reason, len(longer.response_ids)) == (StopReason.TRUNCATED, used + 1)
    assert longer.loss_mask == [True] * (used - 7) + [False] * 7 + [True]
    assert (await play([answer("3")], response=len(answer("3")) + 1)).stop_reason is StopReason.ANSWERED


async def test_nothing_is_asked_where_no_room_is_left():
    state = begin(response=5)
    full = await play_turn(
        RolloutState(**{name: getattr(state, name) for name in ("request", "prompt_ids", "turns")} | {
            "response_ids": [1] * 5, "loss_mask": [True] * 5, "logprobs": [0.0] * 5, "policy_versions": [0] * 5}),
        generate=ScriptedEngine([]), execute=AddingSandbox(), chat=CHAT,
    )  # fmt: skip
    assert full.stop_reason is StopReason.TRUNCATED and not full.turns


async def test_the_last_turn_that_may_call_is_the_one_before_the_last():
    said = [call("1+2"), call("1+2"), answer("3")]
    assert (await play(said, turns=3)).stop_reason is StopReason.ANSWERED
    stopped = await play(said, turns=2)
    assert stopped.stop_reason is StopReason.MAX_TURNS
    assert [len(turn.tool_results) for turn in stopped.turns] == [1, 0]


async def test_what_a_rollout_was_and_what_it_is_worth():
    async def judge(text: str, problem: Problem) -> Judgement:
        return Judgement(0.5, answer="x" * 300, retries=2)

    finished = await score(await play([call("1+2") + call("oops"), answer("3")]), judge)
    record = finished.summary
    assert (record.reward, record.judge_retries, record.answer) == (0.5, 2, "x" * MAX_ANSWER_CHARS)
    assert MAX_ANSWER_CHARS == 200
    assert (record.num_calls, record.num_failed, record.num_answers, record.num_turns) == (2, 1, 1, 2)
    assert record.num_sampled_tokens == sum(turn.num_tokens for turn in finished.turns) == finished.loss_mask.sum()
    assert (record.num_prompt_tokens, record.num_response_tokens) == (PROMPT, len(finished.response_ids))
    assert (record.policy_version_min, record.policy_version_max) == (0, 0)
    refused = await score(begin(context=3), judge)
    versions = (refused.summary.policy_version_min, refused.summary.policy_version_max)
    assert (refused.summary.reward, versions, refused.summary.num_turns) == (0.0, (0, 0), 0)


async def test_versions_of_a_trajectory_are_the_least_and_the_most_that_sampled():
    async def generate(
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        max_tokens: int,
        seed: int,
        sampling: Sampling,
        begun: Completion | None = None,
    ) -> Completion:
        ids = [ord(letter) for letter in answer("3")]
        return Completion(
            token_ids=ids, logprobs=[0.0] * len(ids), policy_versions=[7, *[9] * (len(ids) - 1)], ended=True
        )

    async def judge(text: str, problem: Problem) -> Judgement:
        return Judgement(1.0)

    state = await run_rollout(begin(), generate=generate, execute=AddingSandbox(), chat=CHAT)
    record = (await score(state, judge)).summary
    assert (record.policy_version_min, record.policy_version_max) == (7, 9)


async def test_calls_of_one_turn_run_at_once_and_one_alone_without_a_task():
    running = most = 0

    async def execute(call: ToolCall) -> ToolResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        result = await AddingSandbox()(call)
        running -= 1
        return result

    engine = ScriptedEngine([call("1+2") * 3, answer("3")])
    await run_rollout(begin(), generate=engine, execute=execute, chat=CHAT)
    assert most == 3


# -- many rollouts -----------------------------------------------------------------------------------------------------

PROBLEMS = [Problem(id=name, problem=name, answer="1") for name in ("a", "b")]
ASKED = sibling_requests(
    PROBLEMS, 2, limits=limits(), sampling=Sampling(temperature=1.0, top_p=1.0), seed=3, name="s/1", at="/step-4"
)


def test_siblings_have_ids_and_seeds_of_their_own():
    assert [one.rollout_id for one in ASKED] == [f"s/1/step-4/{n}-{p}/{s}" for n, p in enumerate("ab") for s in (0, 1)]
    assert [one.group_id for one in ASKED] == ["s/1/step-4/0-a"] * 2 + ["s/1/step-4/1-b"] * 2
    assert [one.seed for one in ASKED] == [derive_seed(3, "s/1", n, p, s) for n, p in enumerate("ab") for s in (0, 1)]
    hashed = hashlib.blake2b(b"1\x1fstage1\x1f2", digest_size=8).digest()
    assert derive_seed(1, "stage1", 2) == int.from_bytes(hashed, "big") // 2


class Flaky:
    """Ends requests from the last to the first; those named fail as often as told."""

    def __init__(self, **fails: int) -> None:
        self.fails, self.asked = {name.replace("_", "/"): times for name, times in fails.items()}, list[str]()

    async def run(self, requests: Sequence[RolloutRequest]) -> AsyncIterator[FinishedRollout | DroppedRollout]:
        for one in reversed(requests):
            self.asked.append(one.rollout_id)
            tail = one.rollout_id.partition("/again-")[0][-3:]
            if self.fails.get(tail, 0) > 0:
                self.fails[tail] -= 1
                yield DroppedRollout(rollout_id=one.rollout_id, group_id=one.group_id, reason="ours")
                continue
            record = replace(summary(one.group_id), rollout_id=one.rollout_id)
            yield FinishedRollout(summary=record, ref=TrajectoryRef(None, 0))


async def test_groups_come_in_the_order_of_the_requests_and_losses_apart():
    groups, dropped = await roll_out(ASKED, Flaky(a_1=1), deadline_s=9.0)
    ids = [[one.summary.rollout_id[-3:] for one in group] for group in groups]
    assert ids == [["a/0"], ["b/0", "b/1"]] and [one.rollout_id[-3:] for one in dropped] == ["a/1"]


async def gathered(rollouts: Flaky) -> tuple[list[list[str]], list[str]]:
    groups: list[list[str]] = []
    lost: list[str] = []
    async for end in whole_groups(ASKED, rollouts, deadline_s=9.0):
        if isinstance(end, DroppedRollout):
            lost.append(end.rollout_id)
        else:
            groups.append([one.summary.rollout_id.partition("-a/")[2] or one.summary.rollout_id[-3:] for one in end])
    return groups, lost


async def test_a_group_is_whole_when_its_last_sibling_ends_though_it_was_asked_for_three_times():
    rollouts = Flaky(a_1=2)
    groups, lost = await gathered(rollouts)
    assert groups == [["b/0", "b/1"], ["0", "1/again-2"]] and lost == []
    assert [name[-11:] for name in rollouts.asked[4:]] == ["a/1/again-1"[-11:], "a/1/again-2"[-11:]]


async def test_what_fails_every_time_comes_last_and_its_group_not_at_all():
    rollouts = Flaky(a_1=9)
    groups, lost = await gathered(rollouts)
    assert groups == [["b/0", "b/1"]] and [name[-11:] for name in lost] == ["a/1/again-2"]
    assert len(rollouts.asked) == 4 + 2


@pytest.mark.parametrize("siblings", [1, 2])
async def test_a_problem_whose_id_reads_as_a_repeat_has_its_group_though_one_was_asked_for_again(siblings: int):
    problems = [Problem(id=name, problem="?", answer="1") for name in ("a/again-1", "a/again-1/x")]
    sampling = Sampling(temperature=1.0, top_p=1.0)
    asked = sibling_requests(problems, siblings, limits=limits(), sampling=sampling, seed=3, name="s")
    rollouts, again = Flaky(), asked[0].rollout_id
    rollouts.fails[again.partition("/again-")[0][-3:]] = 1
    ends = [end async for end in whole_groups(asked, rollouts, deadline_s=9.0)]
    groups = [end for end in ends if not isinstance(end, DroppedRollout)]
    assert len(groups) == len(ends) == 2 and {len(group) for group in groups} == {siblings}
    assert len(rollouts.asked) == 2 * siblings + 1


# -- data --------------------------------------------------------------------------------------------------------------


def test_a_draw_knows_its_epoch_and_how_far_it_is():
    items = list(range(5))
    for count, position in ((3, DataPosition(0, 3)), (5, DataPosition(0, 5)), (6, DataPosition(1, 1)),
                            (15, DataPosition(2, 5)), (0, DataPosition(0, 0))):  # fmt: skip
        assert draw(items, count, DataPosition(), seed=0, stage="s")[1] == position
    assert draw(items, 1, DataPosition(0, 5), seed=0, stage="s")[1] == DataPosition(1, 1)


def test_near_duplicates_are_those_that_a_comparison_of_all_pairs_finds():
    rng = random.Random(0)
    vocabulary = [f"w{n}" for n in range(60)]
    texts: list[list[str]] = []
    for _ in range(60):
        text = [rng.choice(vocabulary) for _ in range(rng.randint(2, 40))]
        texts.append(text)
        for _ in range(3):  # alike to all degrees
            other = [rng.choice(vocabulary) if rng.random() < 0.04 else word for word in text]
            texts.append(other)
    groups = [rng.randrange(2) for _ in texts]
    expected: list[int] = []
    for index, text in enumerate(texts):
        alike = [
            other
            for other in range(index)
            if expected[other] == other and groups[other] == groups[index]
            and len(_shingles(text) & _shingles(texts[other])) >= 0.7 * len(_shingles(text) | _shingles(texts[other]))
        ]  # fmt: skip
        expected.append(alike[0] if alike else index)
    assert near_duplicates(texts, groups) == expected
    assert 40 < sum(first != index for index, first in enumerate(expected)) < 160


def test_shingles_are_three_words_and_a_short_text_is_one():
    assert _shingles(["a", "b"]) == {("a", "b")} and _shingles([]) == {()}
    assert _shingles(["a", "b", "c", "d"]) == {("a", "b", "c"), ("b", "c", "d")}
    assert _jaccard({("a",), ("b",)}, {("b",), ("c",)}) == pytest.approx(1 / 3)
    import numpy as np

    assert _meeting(np.array([[1, 2], [3, 4], [2, 5], [6, 6]], np.uint64)) == [0, 2, 3]


def test_more_texts_than_are_hashed_at_once_are_compared_all_the_same(monkeypatch: pytest.MonkeyPatch):
    from rstar_ray.data import overlap

    texts = [f"one two three four five {n} six seven" for n in range(7)]
    reference = {"exam": [texts[5], texts[2]]}
    split = [text.split() for text in texts]
    whole = shared_with(texts, reference, size=8), near_duplicates(split, [0] * 7)
    parts = overlap._parts
    monkeypatch.setattr(overlap, "_parts", lambda texts: parts(texts, 3))
    assert (shared_with(texts, reference, size=8), near_duplicates(split, [0] * 7)) == whole
    assert whole[0] == ["", "", "exam", "", "", "exam", ""]


def test_texts_are_compared_by_their_words_and_problems_by_their_signs_too():
    assert words("Don't, 3.5 x_2!") == ["don", "t", "3", "5", "x", "2"]
    read = tokens(r"Find \left( $x^{2}$ \right) < 3.50, ok?")
    assert read == ["find", "(", "x", "^", "2", ")", "<", "3.50", "ok", "?"]
    assert numbers_of(["12", "x", "3", "12"]) == ("12", "12", "3")
    eight = "a b c d e f g h"
    assert shared_with([eight], {"first": [f"x {eight}"], "second": [eight]}) == ["first"]
    assert shared_with(["a b c d e f g", "a b"], {"set": ["x a b c d e f g", "A, b!"]}) == ["", "set"]


# -- evaluations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budgets", [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8, 9]])
def test_pass_is_estimated_at_powers_of_two_and_at_all(budgets: list[int]):
    k = budgets[-1]
    problem = Problem(id="p", problem="?", answer="1", family="f", difficulty=2.0)
    rollouts = [summary("p", sibling, reward=float(sibling == 0)) for sibling in range(k)]
    result = evaluate(results_of([problem], rollouts), stage="s", step=1)
    assert result.pass_at == pytest.approx({budget: budget / k for budget in budgets})
    assert list(result.by_family) == ["f"] and list(result.by_difficulty) == ["2"]
    assert (result.ci_low, result.ci_high) == pytest.approx((1 / k, 1 / k))
    assert (result.share_truncated, result.calls_mean, result.response_tokens_mean) == (0.0, 1.0, 80.0)
    nothing = evaluate(results_of([problem], [summary("p", reward=0.0, calls=0, response=0)]), stage="s", step=1)
    assert (nothing.maj_at_k, nothing.calls_mean, nothing.response_tokens_mean) == (0.0, 0.0, 0.0)
    assert (nothing.tool_error_share, nothing.tool_error_share_correct) == (None, None)


def test_an_interval_holds_ninety_five_of_a_hundred_redraws():
    low, high = bootstrap_interval([0.0, 1.0] * 200)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.004) and high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.004)
    low, high = bootstrap_interval([0.0, 1.0] * 200, confidence=0.5)
    assert low == pytest.approx(0.5 - 0.674 * 0.025, abs=0.004)
    ratio = bootstrap_ratio([(0.0, 1.0), (1.0, 1.0)] * 200)
    assert ratio == pytest.approx((0.451, 0.549), abs=0.005)
    assert bootstrap_ratio([(1.0, 0.0)] * 3) is None
    assert bootstrap_ratio([(1.0, 2.0), (0.0, 0.0)]) == pytest.approx((0.5, 0.5))
