from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rstar_ray.agent.rollout import RolloutState, run_rollout, score, transcript
from rstar_ray.algorithm.resample import total_penalty
from rstar_ray.chat.template import Reading
from rstar_ray.config import AlgorithmConfig, RewardConfig
from rstar_ray.errors import EngineError, SandboxError
from rstar_ray.outcome import Outcome
from rstar_ray.reward.judge import Judgement, make_judge
from rstar_ray.run_dir.trajectory_log import readable
from rstar_ray.tools.environment import Reply
from rstar_ray.trajectory import (
    Completion,
    Problem,
    RolloutLimits,
    StopReason,
    ToolCall,
    ToolMemory,
    ToolResult,
    Transcript,
)
from tests.fakes import (
    LIMITS,
    AddingSandbox,
    CharChat,
    ScriptedEngine,
    UnreliableSandbox,
    answer,
    call,
    request,
    same_text,
)

CHAT = CharChat()
TRUTH = {"math": "3", "exact": "3", "code": '[{"input": "", "output": "3"}]'}


async def no_comparison(pairs: Sequence[tuple[str, str]]) -> Sequence[bool]:
    raise AssertionError("integers are compared without the sandbox")


async def prints_3(code: str, stdin: str) -> tuple[Outcome, str]:
    return Outcome.OK, "3"


def begun(limits: RolloutLimits = LIMITS) -> RolloutState:
    wanted = request(limits=limits)
    return RolloutState.start(wanted, CHAT.prompt_ids(wanted.problem))


async def play(completions: list[str], limits: RolloutLimits = LIMITS, **engine: object) -> RolloutState:
    return await run_rollout(
        begun(limits),
        generate=ScriptedEngine(completions, **engine),  # type: ignore[arg-type]
        execute=AddingSandbox(),
        chat=CHAT,
    )


@pytest.mark.parametrize(
    ("said", "reward", "num_answers"),
    [
        (answer("3"), RewardConfig(), 1),
        ("so \\boxed{3}", RewardConfig(), 0),
        ("so \\boxed{3}", RewardConfig(place="boxed"), 1),
        ("\\boxed{1}, no: \\boxed{3}", RewardConfig(place="boxed", name="exact"), 2),
        ("The answer is 3", RewardConfig(place="anywhere"), 1),
        (answer("3"), RewardConfig(name="code"), None),
    ],
)
async def test_answers_are_counted_where_the_reward_reads_them(
    said: str, reward: RewardConfig, num_answers: int | None
):
    judge = make_judge(reward, no_comparison, prints_3)
    state = await play([call("1+2"), said])
    state = replace(
        state, request=replace(state.request, problem=replace(state.request.problem, answer=TRUTH[reward.name]))
    )
    summary = (await score(state, judge)).summary
    assert summary.num_answers == num_answers
    flawless = total_penalty(summary, AlgorithmConfig()) == 0
    assert flawless == (num_answers in (1, None))


async def test_the_loss_mask_is_true_exactly_where_the_policy_sampled():
    said = [call("1+2"), answer("3")]
    trajectory = await score(await play(said), same_text)
    sampled = CHAT.decode(trajectory.response_ids[trajectory.loss_mask].tolist())
    answered = CHAT.decode(trajectory.response_ids[~trajectory.loss_mask].tolist())
    assert sampled == "".join(said)
    assert answered == "\nT:3\nA:"
    assert (trajectory.rollout_logprobs[trajectory.loss_mask] == -0.5).all()
    assert (trajectory.rollout_logprobs[~trajectory.loss_mask] == 0).all()
    assert (trajectory.policy_versions[~trajectory.loss_mask] == -1).all()
    assert trajectory.summary.num_sampled_tokens == trajectory.loss_mask.sum()


async def test_each_token_keeps_the_weights_that_sampled_it_where_a_swap_falls_inside_a_turn():
    engine = ScriptedEngine([call("1+2"), answer("3")])

    async def swapped_inside(prompt_ids: Sequence[int], **asked: Any) -> Completion:
        said = await engine(prompt_ids, **asked)
        first = 6 if len(engine.prompts) == 1 else 0
        return replace(said, policy_versions=[4] * first + [5] * (len(said.token_ids) - first))

    state = await run_rollout(begun(), generate=swapped_inside, execute=AddingSandbox(), chat=CHAT)
    trajectory = await score(state, same_text)
    sampled = trajectory.policy_versions[trajectory.loss_mask].tolist()
    assert sampled == [4] * 6 + [5] * (len(sampled) - 6)
    assert (trajectory.summary.policy_version_min, trajectory.summary.policy_version_max) == (4, 5)
    turns = readable(trajectory, CHAT.decode)["turns"]
    assert [turn["policy_versions"] for turn in turns] == [[4, 5], [5]]


async def test_every_turn_is_sampled_from_exactly_the_tokens_so_far():
    engine = ScriptedEngine([call("1+2"), answer("3")])
    state = await run_rollout(begun(), generate=engine, execute=AddingSandbox(), chat=CHAT)
    assert engine.prompts[1] == state.prompt_ids + state.response_ids[: len(engine.prompts[1]) - len(state.prompt_ids)]


async def test_a_failed_call_is_counted_by_its_outcome_not_its_text():
    state = await play([call("oops"), call("1+2"), answer("3")])
    trajectory = await score(state, same_text)
    assert trajectory.summary.outcomes == (Outcome.ERROR, Outcome.OK)
    assert trajectory.summary.num_failed == 1


async def test_a_call_that_cannot_be_parsed_gets_its_error_back_and_the_rollout_continues():
    state = await play(["<tool_call>{oops</tool_call>", answer("3")])
    assert state.turns[0].tool_results[0].outcome is Outcome.INVALID
    assert "could not be read" in CHAT.decode(state.response_ids)
    assert (await score(state, same_text)).summary.reward == 1.0


@pytest.mark.parametrize(
    ("said", "limits", "reason", "tokens", "calls"),
    [
        ([answer("3")], {"max_response_tokens": 10}, StopReason.TRUNCATED, 10, 0),
        ([call("1+2")], {"max_response_tokens": len(call("1+2")) + 4}, StopReason.TRUNCATED, len(call("1+2")) + 1, 1),
        ([call("1+2")], {"max_turns": 1}, StopReason.MAX_TURNS, len(call("1+2")) + 1, 0),
        ([], {"max_turns": 1, "max_context_tokens": 4}, StopReason.REFUSED, 0, 0),
    ],
    ids=["a completion is cut", "a result does not fit, and is not appended", "the last turn calls", "a long prompt"],
)
async def test_a_limit_ends_a_rollout_which_scores_zero(
    said: list[str], limits: dict[str, Any], reason: StopReason, tokens: int, calls: int
):
    state = await play(said, replace(LIMITS, **limits))
    summary = (await score(state, same_text)).summary
    assert (summary.stop_reason, summary.num_response_tokens, summary.reward) == (reason, tokens, 0.0)
    assert all(state.loss_mask) and summary.num_calls == calls


async def test_the_last_turn_may_answer():
    assert (await play([answer("3")], replace(LIMITS, max_turns=1))).stop_reason is StopReason.ANSWERED


async def test_a_rollout_continues_elsewhere_from_its_last_finished_turn():
    said = [call("oops"), call("1+2"), answer("3")]
    whole, first = await play(said), ScriptedEngine(said)
    moved = await run_rollout(begun(), generate=first, execute=AddingSandbox(), chat=CHAT, may_continue=lambda _: False)
    assert moved.stop_reason is None and len(moved.turns) == 1
    resumed = await run_rollout(moved, generate=ScriptedEngine(said[1:]), execute=AddingSandbox(), chat=CHAT)
    assert resumed.response_ids == whole.response_ids
    assert resumed.loss_mask == whole.loss_mask


async def test_a_turn_that_is_sampled_again_elsewhere_is_the_same_request():
    """Same prompt, seed and budget, whatever was sampled of it before its engine was lost."""
    asked: list[tuple[list[int], dict[str, Any]]] = []
    said = [call("oops"), call("1+2"), answer("3")]

    class Recording(ScriptedEngine):
        async def __call__(self, prompt_ids: Sequence[int], **more: Any) -> Completion:
            asked.append((list(prompt_ids), more))
            return await super().__call__(prompt_ids, **more)

    state = begun()
    whole = await run_rollout(state, generate=Recording(said), execute=AddingSandbox(), chat=CHAT)
    (at_once, asked) = (asked, [])
    state = await run_rollout(
        state, generate=ScriptedEngine(said), execute=AddingSandbox(), chat=CHAT, may_continue=lambda _: False
    )
    with pytest.raises(EngineError):
        await run_rollout(state, generate=Recording([], fails_at=0), execute=AddingSandbox(), chat=CHAT)
    again = await run_rollout(state, generate=Recording(said[1:]), execute=AddingSandbox(), chat=CHAT)
    assert again.response_ids == whole.response_ids
    assert asked == [at_once[1], *at_once[1:]]
    assert len({more["seed"] for _, more in at_once}) == 3


async def test_our_own_failures_are_exceptions_and_never_data():
    with pytest.raises(EngineError):
        await play([call("1+2"), answer("3")], fails_at=1)
    with pytest.raises(SandboxError):
        await run_rollout(
            begun(), generate=ScriptedEngine([call("1+2")]), execute=UnreliableSandbox(fails_every=1), chat=CHAT
        )


async def test_calls_beyond_the_cap_of_a_turn_are_not_run_and_count_as_failed():
    limits = replace(LIMITS, max_calls_per_turn=2)
    state = await play([call("1+2") * 3, answer("3")], limits)
    outcomes = [result.outcome for result in state.turns[0].tool_results]
    assert outcomes == [Outcome.OK, Outcome.OK, Outcome.INVALID]
    assert "at most 2 calls in one turn" in CHAT.decode(state.response_ids)


async def test_an_environment_answers_turns_without_a_call_until_it_gives_a_reward():
    heard: list[str] = []

    async def converse(said: str) -> tuple[Reply, ToolMemory]:
        heard.append(said)
        reply = Reply(text="higher") if len(heard) == 1 else Reply(reward=0.25)
        return reply, ToolMemory(calls=len(heard), snapshot=said)

    async def never(completion: str, problem: Problem) -> Judgement:
        raise AssertionError("the environment has judged")

    state = await run_rollout(
        begun(),
        generate=ScriptedEngine(["1", call("1+2"), "2"]),
        execute=AddingSandbox(),
        chat=CHAT,
        converse=converse,
    )
    assert heard == ["1", "2"]
    assert state.memories == {"environment": ToolMemory(calls=2, snapshot="2")}
    trajectory = await score(state, never)
    assert (trajectory.summary.reward, trajectory.summary.num_turns) == (0.25, 3)
    assert trajectory.summary.num_answers is None  # an environment reads no marked answer
    answered = CHAT.decode(trajectory.response_ids[~trajectory.loss_mask].tolist())
    assert answered == "\nU:higher\nA:\nT:3\nA:"


class RecordingChat(CharChat):
    """Records whether each completion is read as one that follows tool results."""

    def __init__(self) -> None:
        super().__init__()
        self.after_tools: list[bool] = []

    def read(self, token_ids: Sequence[int], *, after_tools: bool, own_tools: bool = False) -> Reading:
        self.after_tools.append(after_tools)
        return super().read(token_ids, after_tools=after_tools)


async def test_a_turn_after_the_environment_s_reply_is_not_read_as_one_after_tools():
    chat, talk = RecordingChat(), Talk()
    state = await run_rollout(
        begun(replace(LIMITS, max_environment_turns=2)),
        generate=ScriptedEngine(["1", call("1+2"), "2", "3"]),
        execute=AddingSandbox(),
        chat=chat,
        converse=talk.converse,
        ended=talk.ended,
    )
    assert chat.after_tools == [False, False, True]
    transcript(state, StopReason.MAX_TURNS, chat)
    assert chat.after_tools[3:] == [False, False, True]


class Talk:
    """An environment that replies without an end; what it receives at the rollout's end, and what it gives for it."""

    def __init__(self, gives: float | None = None) -> None:
        self.gives = gives
        self.heard: list[str] = []

    async def converse(self, said: str) -> tuple[Reply, ToolMemory]:
        self.heard.append(said)
        return Reply(text="go on"), ToolMemory(calls=len(self.heard))

    async def ended(self, reason: StopReason) -> tuple[float | None, ToolMemory]:
        self.heard.append(f"ended: {reason}")
        return self.gives, ToolMemory(calls=len(self.heard))

    async def play(self, completions: list[str], state: RolloutState | None = None, **limits: Any) -> RolloutState:
        return await run_rollout(
            state or begun(replace(LIMITS, **limits)),
            generate=ScriptedEngine(completions),
            execute=AddingSandbox(),
            chat=CHAT,
            converse=self.converse,
            ended=self.ended,
        )


async def test_turns_of_an_environment_have_a_separate_limit():
    talk = Talk()
    state = await talk.play(["1", "2", call("1+2"), "3", "4"], max_turns=2, max_environment_turns=3)
    assert state.stop_reason is StopReason.MAX_TURNS
    assert talk.heard == ["1", "2", "3", "ended: max_turns"]
    assert (await score(state, same_text)).summary.reward == 0.0


@pytest.mark.parametrize(("gives", "reward"), [(None, 0.0), (0.6, 0.6), (-2.0, -2.0)])
async def test_the_environment_gives_the_reward_of_a_rollout_that_a_limit_ends(gives: float | None, reward: float):
    async def never(completion: str, problem: Problem) -> Judgement:
        raise AssertionError("the environment has judged")

    talk = Talk(gives)
    state = await talk.play(["a", "b" * 500])
    assert (state.stop_reason, talk.heard) == (StopReason.TRUNCATED, ["a", "ended: truncated"])
    assert state.memories == {"environment": ToolMemory(calls=2)}
    assert (await score(state, never)).summary.reward == reward
    again = await talk.play([], state)  # a rollout that had ended when its worker was lost
    assert (again, len(talk.heard)) == (state, 2)


class WholeRollouts:
    """A judge that reads whole rollouts; see `rstar_ray.reward.judge.RolloutJudge`."""

    def __init__(self) -> None:
        self.seen: list[Transcript] = []

    async def __call__(self, completion: str, problem: Problem) -> Judgement:
        raise AssertionError("it reads whole rollouts")

    async def reads_rollouts(self, problem: Problem) -> bool:
        return True

    async def judge_rollout(self, completion: str, problem: Problem, rollout: Transcript) -> Judgement:
        self.seen.append(rollout)
        return Judgement(-1.5)


async def test_a_judge_of_whole_rollouts_sees_turns_calls_outcomes_and_lengths():
    judge = WholeRollouts()
    state = await play([call("oops") + call("1+2"), answer("3")])
    assert (await score(state, judge, CHAT)).summary.reward == -1.5
    (seen,) = judge.seen
    assert [turn.completion for turn in seen.turns] == [call("oops") + call("1+2"), answer("3")]
    assert [one.code for one in seen.turns[0].calls] == ["oops", "1+2"]
    assert [one.outcome for one in seen.turns[0].results] == [Outcome.ERROR, Outcome.OK]
    assert (seen.num_calls, seen.num_failed, seen.stop_reason) == (2, 1, StopReason.ANSWERED)
    assert (seen.num_prompt_tokens, seen.num_response_tokens) == (len(state.prompt_ids), len(state.response_ids))
    assert seen.num_sampled_tokens == sum(turn.num_tokens for turn in seen.turns) < seen.num_response_tokens
    assert (seen.max_response_tokens, seen.max_turns) == (LIMITS.max_response_tokens, LIMITS.max_turns)


async def test_a_judge_of_whole_rollouts_judges_those_that_a_limit_ended_but_none_that_never_began():
    judge = WholeRollouts()
    cut = await play(["a" * 20], replace(LIMITS, max_response_tokens=10))
    assert (await score(cut, judge, CHAT)).summary.reward == -1.5
    called = await play([call("1+2")], replace(LIMITS, max_turns=1))
    assert (await score(called, judge, CHAT)).summary.reward == -1.5
    refused = await play([], replace(LIMITS, max_context_tokens=4))
    assert (await score(refused, judge, CHAT)).summary.reward == 0.0
    assert [seen.stop_reason for seen in judge.seen] == [StopReason.TRUNCATED, StopReason.MAX_TURNS]
    assert [len(turn.results) for turn in judge.seen[1].turns] == [0]


async def test_where_a_tool_with_state_stands_goes_with_the_rollout():
    async def execute(one: ToolCall) -> ToolResult:
        return ToolResult(outcome=Outcome.OK, text="noted", memory=("notes", ToolMemory(calls=1, snapshot=one.code)))

    state = await run_rollout(
        begun(), generate=ScriptedEngine([call("x")]), execute=execute, chat=CHAT, may_continue=lambda _: False
    )
    assert state.memories == {"notes": ToolMemory(calls=1, snapshot="x")}
    assert state.turns[0].tool_results[0].memory is None  # not kept twice
    again = state.restarted()
    assert (again.restarts, again.memories, again.response_ids, again.prompt_ids) == (1, {}, [], state.prompt_ids)
