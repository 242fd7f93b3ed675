"""A tool at its host: deadlines, caps, and the state of each rollout."""

import asyncio
from typing import Any

import pytest

from rstar_ray.outcome import Outcome
from rstar_ray.tools.environment import Reply
from rstar_ray.tools.host import HostAnswer, HostCall, ToolHost, shortened
from rstar_ray.tools.tool import Tool, ToolFailed
from rstar_ray.trajectory import Problem, ToolMemory

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
PROBLEM = Problem(id="p", problem="?", answer="3")


async def odd(text: str) -> Any:
    match text:
        case "fail":
            raise ToolFailed("no such thing")
        case "raise":
            raise KeyError("x")
        case "hang":
            await asyncio.Event().wait()
        case "late":
            raise TimeoutError("of its own")
        case "megabyte":
            return "x" * (1 << 20)
        case "number":
            return 7
        case _:
            return text


@pytest.mark.parametrize(
    ("text", "outcome", "answer"),
    [
        ("hello", Outcome.OK, "hello"),
        ("nothing found", Outcome.ERROR, "nothing found"),
        ("fail", Outcome.ERROR, "no such thing"),
        ("raise", Outcome.ERROR, "Error: KeyError: 'x'"),
        ("late", Outcome.ERROR, "Error: TimeoutError: of its own"),
        ("hang", Outcome.TIMEOUT, "Error: no answer within 0.05 s."),
        ("number", Outcome.ERROR, "Error: the tool gave int, not text."),
    ],
)
async def test_whatever_a_tool_does_is_an_outcome_that_the_model_reads(text: str, outcome: Outcome, answer: str):
    tool = Tool(
        name="odd",
        description="?",
        parameters=TEXT,
        function=odd,
        deadline_s=0.05,
        failed=lambda said: "nothing" in said,
    )
    got = await ToolHost(tool).call(HostCall(arguments={"text": text}))
    assert (got.outcome, got.text) == (outcome, answer)


async def test_a_megabyte_is_cut_at_its_middle():
    tool = Tool(name="odd", description="?", parameters=TEXT, function=odd, max_chars=100)
    got = await ToolHost(tool).call(HostCall(arguments={"text": "megabyte"}))
    assert got.outcome is Outcome.OK
    assert got.text == "x" * 75 + f"\n... [{(1 << 20) - 100} characters left out] ...\n" + "x" * 25
    assert shortened("short", 100) == "short"


class Tally:
    """Joins what it was called with; `made` and `closed` say what became of all of them."""

    made: list[str | None] = []  # noqa: RUF012
    closed: list[str] = []  # noqa: RUF012

    def __init__(self, problem: Problem, snapshot: str | None) -> None:
        self.said = snapshot or ""
        self.made.append(snapshot)

    async def call(self, text: str) -> str:
        if text == "raise":
            raise ValueError("odd")
        self.said += text
        return self.said

    def snapshot(self) -> str:
        return self.said

    async def close(self) -> None:
        self.closed.append(self.said)


class Forgetful(Tally):
    snapshot = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def fresh() -> None:
    Tally.made.clear()
    Tally.closed.clear()


def host_of(state: Any) -> ToolHost:
    return ToolHost(Tool(name="tally", description="?", parameters=TEXT, state=state))


async def say(
    host: ToolHost, text: str, memory: ToolMemory | None = None, *, rollout_id: str = "r", holder: str = "a"
) -> HostAnswer:
    call = HostCall(arguments={"text": text}, rollout_id=rollout_id, holder=holder, problem=PROBLEM, memory=memory)
    return await host.call(call)


async def test_each_rollout_has_a_state_of_its_own_until_it_ends():
    host = host_of(Tally)
    first = await say(host, "a")
    assert (first.text, first.memory) == ("a", ToolMemory(calls=1, snapshot="a"))
    assert (await say(host, "x", rollout_id="other")).text == "x"
    second = await say(host, "b", first.memory)
    assert (second.text, second.memory) == ("ab", ToolMemory(calls=2, snapshot="ab"))
    await host.end("r", "a")
    assert (Tally.made, Tally.closed, host.num_states) == ([None, None], ["ab"], 1)
    await host.close()
    assert Tally.closed == ["ab", "x"]


async def test_a_rollout_that_goes_back_to_its_last_finished_turn_finds_the_state_of_then():
    host = host_of(Tally)
    then = (await say(host, "a")).memory
    await say(host, "lost", then)
    again = await say(host, "b", then, holder="b")
    assert again.text == "ab"
    assert Tally.made == [None, "a"] and Tally.closed == ["alost"]


async def test_a_new_host_makes_the_state_from_its_snapshot_or_says_that_it_is_lost():
    memory = ToolMemory(calls=2, snapshot="ab")
    assert (await say(host_of(Tally), "c", memory)).text == "abc"
    lost = await say(host_of(Forgetful), "c", ToolMemory(calls=2))
    assert lost.lost and lost.memory is None


async def test_only_who_plays_a_rollout_ends_its_state():
    host = host_of(Tally)
    memory = (await say(host, "a", holder="a")).memory
    await say(host, "b", memory, holder="b")
    await host.end("r", "a")
    assert host.num_states == 1
    await host.end("r", "b")
    assert host.num_states == 0


class Slow(Tally):
    async def call(self, text: str) -> str:
        before = self.said
        await asyncio.sleep(0.02)
        self.said = before + text
        return self.said


@pytest.mark.parametrize("holder", ["a", "b"])
async def test_a_call_that_still_runs_for_a_worker_that_is_gone_changes_a_state_of_its_own(holder: str):
    """The worker that comes after it may have the same name."""
    host = host_of(Slow)
    then = (await say(host, "a")).memory
    lost = asyncio.create_task(say(host, "lost", then))
    await asyncio.sleep(0.005)
    again = await say(host, "b", then, holder=holder)
    assert again.text == "ab" and (await lost).text == "alost"
    assert Tally.made == [None, "a"] and host.num_states == 1


async def test_a_call_that_raises_is_a_call_of_the_state_too():
    host = host_of(Tally)
    first = await say(host, "raise")
    assert (first.outcome, first.text) == (Outcome.ERROR, "Error: ValueError: odd")
    assert (await say(host, "a", first.memory)).text == "a"


async def test_a_state_that_cannot_be_made_is_an_outcome():
    def broken(problem: Problem, snapshot: str | None) -> Any:
        raise OSError("no database")

    answer = await say(host_of(broken), "a")
    assert (answer.outcome, answer.text, answer.memory) == (Outcome.ERROR, "Error: OSError: no database", None)


class Game:
    """Ends with a reward at the third turn; a bad one where it is told to."""

    async def start(self, problem: Problem) -> None:
        self.left = int(problem.answer)

    async def reply(self, said: str) -> Any:
        if said == "bad":
            return "no reply"
        self.left -= 1
        return Reply(text=f"{self.left} left") if self.left else Reply(reward=2.0 if said == "greedy" else 0.5)

    async def close(self) -> None: ...


async def test_an_environment_is_a_state_that_answers_with_replies():
    host = ToolHost(environment=Game)

    async def reply(said: str, memory: ToolMemory | None) -> HostAnswer:
        call = HostCall(arguments={"said": said}, rollout_id="r", holder="a", problem=PROBLEM, memory=memory)
        return await host.call(call)

    first = await reply("one", None)
    assert (first.text, first.reward) == ("2 left", None)
    second = await reply("two", first.memory)
    assert (await reply("three", second.memory)).reward == 0.5
    assert (await ToolHost(environment=Game).call(HostCall(arguments={"said": "x"}, memory=second.memory))).lost


async def test_an_environment_that_gives_no_reply_or_no_reward_is_no_outcome_of_the_policys():
    host = ToolHost(environment=Game)
    call = HostCall(arguments={"said": "bad"}, rollout_id="r", holder="a", problem=PROBLEM)
    assert (await host.call(call)).text == "the environment gave str, not a Reply"
    one = Problem(id="p", problem="?", answer="1")
    greedy = HostCall(arguments={"said": "greedy"}, rollout_id="s", holder="a", problem=one)
    assert (await host.call(greedy)).text == "the environment gave the reward 2.0, not 0 to 1"
