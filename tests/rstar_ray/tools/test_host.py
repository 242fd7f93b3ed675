"""A tool at its host: deadlines, caps, and the state of each rollout."""

import asyncio
import pickle
from dataclasses import replace
from typing import Any

import pytest

from rstar_ray.errors import ToolError
from rstar_ray.outcome import Outcome
from rstar_ray.tools.environment import Reply
from rstar_ray.tools.host import AtStake, HostAnswer, HostCall, ToolHost, shortened
from rstar_ray.tools.tool import Tool, ToolFailed
from rstar_ray.trajectory import Problem, StopReason, ToolMemory

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
PROBLEM = Problem(id="p", problem="?", answer="3")


class Unsendable(str):
    """As a parser's string that refers to its tree."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot be sent")


async def odd(text: str) -> Any:
    match text:
        case "fail":
            raise ToolFailed("no such thing")
        case "raise":
            raise KeyError("x")
        case "exit":
            raise SystemExit(2)
        case "hang":
            await asyncio.Event().wait()
        case "late":
            raise TimeoutError("of its own")
        case "subclass":
            return Unsendable("an element's text")
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
        ("exit", Outcome.ERROR, "Error: RuntimeError: SystemExit: 2"),
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


class Joined:
    """Joins the texts of its calls; `made` and `closed` list the snapshots at start and end of all instances."""

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


class Forgetful(Joined):
    snapshot = None  # type: ignore[assignment]


class Exits(Joined):
    def __init__(self, problem: Problem, snapshot: str | None) -> None:
        super().__init__(problem, snapshot)
        if problem.id == "exits":
            raise SystemExit(3)

    def snapshot(self) -> str:
        raise SystemExit(4)

    async def close(self) -> None:
        raise SystemExit(5)


@pytest.fixture(autouse=True)
def fresh() -> None:
    Joined.made.clear()
    Joined.closed.clear()


def host_of(state: Any) -> ToolHost:
    return ToolHost(Tool(name="joined", description="?", parameters=TEXT, state=state))


async def say(
    host: ToolHost, text: str, memory: ToolMemory | None = None, *, rollout_id: str = "r", holder: str = "a"
) -> HostAnswer:
    call = HostCall(arguments={"text": text}, rollout_id=rollout_id, holder=holder, problem=PROBLEM, memory=memory)
    return await host.call(call)


async def test_a_state_that_exits_does_not_end_its_host():
    host = host_of(Exits)
    problem = replace(PROBLEM, id="exits")
    made = await host.call(HostCall(arguments={"text": "a"}, rollout_id="r", problem=problem))
    assert (made.outcome, made.text) == (Outcome.ERROR, "Error: RuntimeError: SystemExit: 3")
    assert (await say(host, "a")).memory == ToolMemory(calls=1)
    await host.end("r", "a")
    assert host.num_states == 0


async def test_each_rollout_has_a_separate_state_until_it_ends():
    host = host_of(Joined)
    first = await say(host, "a")
    assert (first.text, first.memory) == ("a", ToolMemory(calls=1, snapshot="a"))
    assert (await say(host, "x", rollout_id="other")).text == "x"
    second = await say(host, "b", first.memory)
    assert (second.text, second.memory) == ("ab", ToolMemory(calls=2, snapshot="ab"))
    await host.end("r", "a")
    assert (Joined.made, Joined.closed, host.num_states) == ([None, None], ["ab"], 1)
    await host.close()
    assert Joined.closed == ["ab", "x"]


async def test_a_rollout_that_goes_back_to_its_last_finished_turn_finds_the_state_of_then():
    host = host_of(Joined)
    then = (await say(host, "a")).memory
    await say(host, "lost", then)
    again = await say(host, "b", then, holder="b")
    assert again.text == "ab"
    assert Joined.made == [None, "a"] and Joined.closed == ["alost"]


async def test_a_new_host_makes_the_state_from_its_snapshot_or_says_that_it_is_lost():
    memory = ToolMemory(calls=2, snapshot="ab")
    assert (await say(host_of(Joined), "c", memory)).text == "abc"
    lost = await say(host_of(Forgetful), "c", ToolMemory(calls=2))
    assert lost.lost and lost.memory is None


async def test_a_host_says_what_would_be_lost_with_it():
    host, forgets = host_of(Joined), host_of(Forgetful)
    assert host.at_stake().line() == ""
    await say(host, "a")
    await say(host, "b", ToolMemory(calls=1, snapshot="a"), rollout_id="restored")
    assert host.at_stake().line() == "the states of 2 rollouts, all with a snapshot"
    await say(forgets, "a")
    both = host.at_stake() + forgets.at_stake()
    assert both.line() == "the states of 3 rollouts, of which 1 had no snapshot: those rollouts start again"
    await forgets.end("r", "a")
    assert forgets.at_stake() == AtStake()


async def test_who_continues_with_a_rollout_ends_its_state_though_it_never_calls():
    host = host_of(Joined)
    await say(host, "a", holder="a")
    host.take_over("r", "b")
    host.take_over("unknown", "b")
    await host.end("r", "a")
    assert host.num_states == 1
    await host.end("r", "b")
    assert (host.num_states, Joined.closed) == (0, ["a"])


@pytest.mark.parametrize("holder", ["a", "b"])
async def test_a_call_that_still_runs_for_a_worker_that_is_gone_changes_a_separate_state(holder: str):
    """The worker that comes after it may have the same name."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    class Held(Joined):
        async def call(self, text: str) -> str:
            before = self.said
            if text == "lost":
                begun.set()
                await may_end.wait()
            self.said = before + text
            return self.said

    host = host_of(Held)
    then = (await say(host, "a")).memory
    lost = asyncio.create_task(say(host, "lost", then))
    await begun.wait()
    again = await say(host, "b", then, holder=holder)
    may_end.set()
    assert again.text == "ab" and (await lost).lost
    assert Joined.made == [None, "a"] and host.num_states == 1


@pytest.mark.parametrize("first", [0, 1])
async def test_of_two_states_that_are_being_made_the_later_players_is_kept(first: int):
    """Whichever is made first."""
    begun, may_end = [asyncio.Event(), asyncio.Event()], [asyncio.Event(), asyncio.Event()]
    numbers = iter(range(2))

    async def slowly(problem: Problem, snapshot: str | None) -> Joined:
        number = next(numbers, None)
        if number is not None:
            begun[number].set()
            await may_end[number].wait()
        return Joined(problem, snapshot)

    host = host_of(slowly)
    lost = asyncio.create_task(say(host, "lost"))
    await begun[0].wait()
    again = asyncio.create_task(say(host, "a", holder="b"))
    await begun[1].wait()
    may_end[first].set()
    await (lost, again)[first]
    may_end[1 - first].set()
    assert (await lost).lost
    answer = await again
    await asyncio.sleep(0)  # nobody waits for it to be closed
    assert (answer.text, Joined.closed) == ("a", [""])
    assert (await say(host, "b", answer.memory, holder="b")).text == "ab" and host.num_states == 1


class Unreachable(Joined):
    """Of a service that is gone, now and then."""

    async def call(self, text: str) -> str:
        self.said += text
        if text == "gone":
            raise ToolError("the service is gone")
        return self.said


async def test_what_a_tool_says_is_our_failure_is_not_an_outcome_and_the_state_of_then_comes_back():
    async def gone(text: str) -> str:
        raise ToolError("the service is gone")

    tool = Tool(name="odd", description="?", parameters=TEXT, function=gone)
    assert (await ToolHost(tool).call(HostCall(arguments={"text": "a"}))).fault == "the service is gone"

    host = host_of(Unreachable)
    first = await say(host, "a")
    assert (await say(host, "gone", first.memory)).fault == "the service is gone"
    assert (await say(host, "b", first.memory)).text == "ab"

    def unmade(problem: Problem, snapshot: str | None) -> Any:
        raise ToolError("no service")

    assert (await say(host_of(unmade), "a")).fault == "no service"


class Game:
    """Ends with a reward at the third turn; a bad one where asked to."""

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


async def test_the_parameter_of_reply_may_have_any_name_and_a_boolean_is_a_reward():
    class Plain:
        async def start(self, problem: Problem) -> None: ...

        async def reply(self, text: str) -> Reply:
            return Reply(reward=text == "yes")

        async def close(self) -> None: ...

    call = HostCall(arguments={"said": "yes"}, rollout_id="r", holder="a", problem=PROBLEM)
    answer = await ToolHost(environment=Plain).call(call)
    assert (answer.outcome, answer.reward) == (Outcome.OK, 1.0)


class Odd:
    async def start(self, problem: Problem) -> None: ...

    async def reply(self, said: str) -> Any:
        return {
            "text": Reply(text=None),  # type: ignore[arg-type]
            "reward": Reply(reward="1"),  # type: ignore[arg-type]
            "nan": Reply(reward=float("nan")),
            "list": Reply(reward=[1]),  # type: ignore[arg-type]
        }[said]

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("text", "the text None, which is NoneType"),
        ("reward", "the reward '1', not a finite number"),
        ("nan", "the reward nan, not a finite number"),
        ("list", "the reward [1], not a finite number"),
    ],
)
async def test_a_reply_with_something_odd_in_it_is_an_outcome_that_names_the_environment(said: str, fault: str):
    call = HostCall(arguments={"said": said}, rollout_id="r", holder="a", problem=PROBLEM)
    answer = await ToolHost(environment=Odd).call(call)
    assert (answer.outcome, answer.text) == (Outcome.ERROR, f"the environment Odd gave {fault}")
    assert answer.reward is None


class Points(Game):
    """Gives what was earned where a limit ends it, or does what it is asked to then."""

    earned = 0

    async def reply(self, said: str) -> Any:
        self.said = said
        self.earned += 1
        return Reply(text="go on")

    async def ended(self, reason: str) -> Any:
        if self.earned and self.said == "hang":
            await asyncio.sleep(60)
        if self.earned and self.said == "raise":
            raise KeyError("points")
        return {"none": None, "text": "many"}.get(self.said if self.earned else "", self.earned - 0.5)

    def snapshot(self) -> str:
        return f"{self.earned} {self.said}"

    async def restore(self, snapshot: str) -> None:
        earned, self.said = snapshot.split()
        self.earned = int(earned)


def at_the_end(memory: ToolMemory | None = None) -> HostCall:
    return HostCall(
        arguments={}, rollout_id="r", holder="a", problem=PROBLEM, memory=memory, ended=StopReason.MAX_TURNS
    )


async def test_an_environment_receives_the_end_in_the_state_that_the_rollout_was_in():
    host = ToolHost(environment=Points)
    said = [HostCall(arguments={"said": "a"}, rollout_id="r", holder="a", problem=PROBLEM)]
    first = await host.call(said[0])
    second = await host.call(replace(said[0], memory=first.memory))
    assert (await host.call(at_the_end(second.memory))).reward == 1.5
    assert (await host.call(at_the_end(first.memory))).reward == 0.5  # the worker was lost, and the turn made again
    assert (await ToolHost(environment=Points).call(at_the_end(second.memory))).reward == 1.5  # a host was lost
    assert (await ToolHost(environment=Points).call(at_the_end())).reward == -0.5  # nothing was said before it
    await host.end("r", "a")
    assert host.num_states == 0


@pytest.mark.parametrize(
    ("said", "outcome", "text"),
    [
        ("none", Outcome.OK, ""),
        ("text", Outcome.ERROR, "the environment Points gave at its end the reward 'many', not a finite number"),
        ("raise", Outcome.ERROR, "Error: KeyError: 'points'"),
        ("hang", Outcome.TIMEOUT, "Error: no answer within 0.2 s."),
    ],
)
async def test_what_an_environment_does_at_the_end_is_bounded_and_checked(said: str, outcome: Outcome, text: str):
    host = ToolHost(environment=Points, deadline_s=0.2)
    first = await host.call(HostCall(arguments={"said": said}, rollout_id="r", holder="a", problem=PROBLEM))
    answer = await host.call(at_the_end(first.memory))
    assert (answer.outcome, answer.text, answer.reward) == (outcome, text, None)


async def test_a_subclass_of_str_arrives_as_text():
    tool = Tool(name="odd", description="?", parameters=TEXT, function=odd)
    got = await ToolHost(tool).call(HostCall(arguments={"text": "subclass"}))
    assert pickle.loads(pickle.dumps(got)).text == "an element's text"
