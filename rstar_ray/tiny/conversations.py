"""Conversations to start a tiny policy from: format, tool calls and copying, with wrong calls on purpose.

They stand for the paper's non-reasoning SFT (arXiv:2508.20722 section 4.1): after them a policy writes calls and
answers in the right form, but slips as often as its teacher. Slips are drawn at random for each conversation, never
from the numbers, so that only reinforcement learning can tell the right call from the wrong one.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rstar_ray.errors import SandboxError
from rstar_ray.outcome import Outcome
from rstar_ray.tiny.problems import FAMILIES, Family, Numbers, Question, Split, draw_questions
from rstar_ray.trajectory import ToolCall, ToolResult

Message = dict[str, Any]  # one entry of a `messages` list: role, content, tool_calls
ExecuteCall = Callable[[ToolCall], Awaitable[ToolResult]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationMix:
    """How often the teacher does what; shares in [0, 1]."""

    drills: float = 0.3  # of all conversations: repeat these numbers
    mistakes: float = 0.55  # of tool conversations: the last call computes something else
    failures: float = 0.05  # of tool conversations: the first call raises and is then repaired

    def __post_init__(self) -> None:
        for name in ("drills", "mistakes", "failures"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not a share; give a number from 0 to 1")


@dataclass(frozen=True, slots=True)
class Program:
    """How a family is computed: rightly, and with plausible slips (an operator, the order, one too many or too few).

    No slip is another family's right program: what is learned of one family then never works against another.
    """

    right: str
    slips: tuple[str, ...]


PROGRAMS: dict[str, Program] = {
    "sum": Program("print({a}+{b})", ("print({a}+{b}+1)",)),
    "difference": Program("print({a}-{b})", ("print({b}-{a})",)),
    "product": Program("print({a}*{b})", ("print({a}*({b}-1))",)),
    "remainder": Program("print({a}%{b})", ("print({b}%{a})",)),
    "quotient": Program("print({a}//{b})", ("print({a}//{b}+1)",)),
    "gcd": Program("import math; print(math.gcd({a},{b}))", ("import math; print(math.gcd({a},{b}-1))",)),
    "lcm": Program("import math; print(math.lcm({a},{b}))", ("import math; print(math.lcm({a},{b}-1))",)),
    "power": Program("print({a}**{b})", ("print({a}**({b}-1))",)),
    "range_sum": Program("print(sum(range({a},{b}+1)))", ("print(sum(range({a},{b})))",)),
    "odd_sum": Program("print(sum(range(1,{a}+1,2)))", ("print(sum(range({a}+1)))",)),
    "divisors": Program(
        "print(sum({a}%i==0 for i in range(1,{a}+1)))", ("print(sum({a}%i==0 for i in range(1,{a})))",)
    ),
    "primes": Program(
        "print(sum(all(i%j for j in range(2,i)) for i in range(2,{a}+1)))",
        ("print(sum(all(i%j for j in range(2,i)) for i in range(1,{a}+1)))",),
    ),
    "linear": Program("print(({c}-{b})//{a})", ("print(({c}+{b})//{a})",)),
    "bags": Program("print({a}*{b}-{c})", ("print({a}*{b}+{c})",)),
    "perimeter": Program("print(2*({a}+{b}))", ("print(2*{a}+{b})",)),
}
assert PROGRAMS.keys() == {family.name for family in FAMILIES}

DRILL_PHRASINGS = ("Repeat: {numbers}", "Say {numbers} again.", "Write {numbers} once more.")


@dataclass(frozen=True, slots=True)
class Draft:
    """A conversation before its programs have run: `codes` are called in turn, the last one's output is the answer."""

    prompt: str
    codes: tuple[str, ...] = ()
    reply: str = ""  # of a drill, which calls nothing


def _fill(template: str, numbers: Numbers) -> str:
    return template.format(**numbers._asdict())


def _raising(family: Family, template: str, numbers: Numbers, rng: random.Random) -> str:
    """A call that raises: names never given a value (NameError), or a bracket left open (SyntaxError)."""
    if rng.random() < 0.5:
        return template.format(a="a", b="b", c="c")
    return _fill(template, numbers)[:-1]


def draft_tool_use(question: Question, mix: ConversationMix, rng: random.Random) -> Draft:
    """One way the teacher may solve `question`, slips included."""
    program = PROGRAMS[question.family.name]
    slips = rng.random() < mix.mistakes
    template = rng.choice(program.slips) if slips else program.right
    codes = [_fill(template, question.numbers)]
    if rng.random() < mix.failures:
        codes.insert(0, _raising(question.family, template, question.numbers, rng))
    return Draft(question.text, tuple(codes))


def draft_drill(rng: random.Random) -> Draft:
    """Repeat two to seven numbers of one to four digits."""
    numbers = " ".join(str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(rng.randint(2, 7)))
    return Draft(rng.choice(DRILL_PHRASINGS).format(numbers=numbers), reply=numbers)


def draft_conversations(seed: int, count: int, mix: ConversationMix) -> list[Draft]:
    """`count` drafts over the train split's questions, drills strewn in."""
    rng = random.Random(f"{seed} conversations")
    questions = draw_questions(seed, Split.TRAIN)
    return [
        draft_drill(rng) if rng.random() < mix.drills else draft_tool_use(next(questions), mix, rng)
        for _ in range(count)
    ]


def tool_call_message(code: str) -> Message:
    """The assistant's turn that runs `code`, in the form chat templates know."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "python", "arguments": {"code": code}}}],
    }


def to_messages(draft: Draft, results: list[ToolResult]) -> list[Message]:
    """The finished conversation. Raises SandboxError where a program did not end as its draft means it to."""
    messages: list[Message] = [{"role": "user", "content": draft.prompt}]
    if not draft.codes:
        return [*messages, {"role": "assistant", "content": draft.reply}]
    for code, result in zip(draft.codes, results, strict=True):
        messages += [tool_call_message(code), {"role": "tool", "content": result.text}]
    if results[-1].outcome is not Outcome.OK or not results[-1].text.lstrip("-").isdecimal():
        raise SandboxError(f"{draft.codes[-1]!r} ended as {results[-1].outcome.value}: {results[-1].text[-200:]!r}")
    for code, result in zip(draft.codes[:-1], results, strict=False):
        if result.outcome is not Outcome.ERROR:
            raise SandboxError(f"{code!r} was to raise and ended as {result.outcome.value}")
    return [*messages, {"role": "assistant", "content": f"<answer>\\boxed{{{results[-1].text}}}</answer>"}]


async def generate_conversations(
    seed: int,
    count: int,
    execute: ExecuteCall,
    *,
    mix: ConversationMix | None = None,
    max_in_flight: int = 64,
) -> list[list[Message]]:
    """`count` conversations as `messages` lists, the tool's answers from really running each different program once.

    At most `max_in_flight` programs run at a time. Raises SandboxError where one does not end as meant.
    """
    drafts = draft_conversations(seed, count, mix or ConversationMix())
    codes = list(dict.fromkeys(code for draft in drafts for code in draft.codes))
    room = asyncio.Semaphore(max_in_flight)

    async def run(code: str) -> ToolResult:
        async with room:
            return await execute(ToolCall(code=code))

    results = dict(zip(codes, await asyncio.gather(*map(run, codes)), strict=True))
    return [to_messages(draft, [results[code] for code in draft.codes]) for draft in drafts]


def sample_texts() -> Iterator[str]:
    """What the tiny world reads and writes, for choosing a vocabulary: no program is run."""
    yield "user\nassistant\nsystem\n"
    yield '{"name": "python", "arguments": {"code": "'
    yield "\\boxed{"
    yield 'Traceback (most recent call last):\n  File "<tool>", line 1, in <module>\n' + " " * 12 + "^\n"
    yield "  File \"<tool>\", line 1\nNameError: name 'a' is not defined\nSyntaxError: '(' was never closed\n"
    for draft in draft_conversations(0, 3000, ConversationMix()):
        yield draft.prompt
        for code in draft.codes:
            yield f'{code}"}}}}'
            yield f"    {code}\n"
