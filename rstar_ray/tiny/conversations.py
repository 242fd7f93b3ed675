"""SFT conversations for a tiny policy: format, tool calls and copying, with deliberate wrong calls.

They replace the paper's non-reasoning SFT (arXiv:2508.20722 section 4.1): a policy trained on them writes calls and
answers in the right format and fixes a failed call, but makes slips as often as its teacher. Slips and failures are
drawn at random for each conversation, independent of the numbers, so that only reinforcement learning can distinguish
the right call from the wrong one.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rstar_ray.config import TinyConfig
from rstar_ray.errors import SandboxError
from rstar_ray.outcome import Outcome
from rstar_ray.tiny.families import Numbers
from rstar_ray.tiny.programs import EVERYWHERE, PROGRAMS, Failing, Program, fail
from rstar_ray.tiny.tiny_problems import Question, Split, draw_questions
from rstar_ray.trajectory import ToolCall, ToolResult

Message = dict[str, Any]  # one entry of a `messages` list: role, content, tool_calls
ExecuteCall = Callable[[ToolCall], Awaitable[ToolResult]]

DRILL_PHRASINGS = ("Repeat: {numbers}", "Say {numbers} again.", "Write {numbers} once more.")
RESULT = "{r}"
"""Placeholder in a call for the output of the previous call."""
TRIES = 4
"""Attempts for a program that timed out although it is not an endless loop, because the machine was busy."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A conversation before its programs run: `calls` are made in order, and the last output is the answer."""

    prompt: str
    calls: tuple[str, ...] = ()  # each with the place of its `RESULT`
    failing: str = ""  # called first, and fixed by the first of `calls`
    reply: str = ""  # of a drill, which calls nothing


def _fill(template: str, numbers: Numbers) -> str:
    return template.format(**numbers._asdict(), r=RESULT)


def _templates(program: Program, slips: float, rng: random.Random) -> list[str]:
    """One call for each result, some of them wrong; an answer may come before the last result."""
    templates: list[str] = []
    for step in program.steps:
        if rng.random() >= slips:
            templates.append(step.right)
            continue
        if templates and rng.random() < 0.5:
            return templates
        templates.append(rng.choice(step.slips))
    return templates


def _failing(program: Program, call: str, rng: random.Random) -> str:
    """A first call that fails where `call` was meant."""
    return fail(call, rng.choice(program.failing if rng.random() < 0.5 else EVERYWHERE))


def draft_tool_use(question: Question, teacher: TinyConfig, rng: random.Random) -> Draft:
    """One way the teacher may solve `question`, slips included."""
    program, numbers = PROGRAMS[question.family.name], question.numbers
    fails = rng.random() < teacher.failures
    ruined = fails and rng.random() < teacher.coupling
    calls = [_fill(template, numbers) for template in _templates(program, 1.0 if ruined else teacher.slips, rng)]
    failing = _failing(program, calls[0], rng) if fails else ""
    if rng.random() < teacher.wasted:
        place = rng.randrange(len(calls))
        if RESULT not in calls[place]:
            calls.insert(place, calls[place])
    return Draft(question.text, tuple(calls), failing)


def draft_drill(rng: random.Random) -> Draft:
    """Repeat two to seven numbers of one to four digits."""
    numbers = " ".join(str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(rng.randint(2, 7)))
    return Draft(rng.choice(DRILL_PHRASINGS).format(numbers=numbers), reply=numbers)


def draft_conversations(seed: int, count: int, teacher: TinyConfig) -> list[Draft]:
    """`count` drafts over the SFT split's questions, mixed with drills."""
    rng = random.Random(f"{seed} conversations")
    questions = draw_questions(seed, Split.SFT)
    return [
        draft_drill(rng) if rng.random() < teacher.drills else draft_tool_use(next(questions), teacher, rng)
        for _ in range(count)
    ]


def tool_call_message(code: str) -> Message:
    """The assistant's turn that runs `code`, in the form chat templates know."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "python", "arguments": {"code": code}}}],
    }


class Played:
    """The state of a draft while its calls are run: the messages so far."""

    def __init__(self, draft: Draft) -> None:
        self.messages: list[Message] = [{"role": "user", "content": draft.prompt}]
        self._draft = draft
        self._ahead = [call for call in (draft.failing, *draft.calls) if call]
        self._result = ""

    @property
    def next_call(self) -> str | None:
        """The next call's code; None when only the answer remains."""
        return self._ahead[0].replace(RESULT, self._result) if self._ahead else None

    def take(self, result: ToolResult) -> None:
        """Add the result of `next_call`. Raises SandboxError where the draft expects another outcome."""
        code = self.next_call
        assert code is not None
        usable = result.outcome is Outcome.OK and result.text.removeprefix("-").isdecimal()
        meant_to_fail = bool(self._draft.failing) and len(self._ahead) > len(self._draft.calls)
        if usable is meant_to_fail or _was_held_up(code, result):
            raise SandboxError(f"{code!r} ended as {result.outcome.value}: {result.text[-200:]!r}")
        self.messages += [tool_call_message(code), {"role": "tool", "content": result.text}]
        self._result = result.text
        del self._ahead[0]

    def finished(self) -> list[Message]:
        """The messages with the answer, or with a drill's reply."""
        answer = f"<answer>\\boxed{{{self._result}}}</answer>" if self._draft.calls else self._draft.reply
        return [*self.messages, {"role": "assistant", "content": answer}]


def _was_held_up(code: str, result: ToolResult) -> bool:
    return result.outcome is Outcome.TIMEOUT and Failing.ENDLESS not in code


async def generate_conversations(
    seed: int,
    count: int,
    execute: ExecuteCall,
    *,
    teacher: TinyConfig | None = None,
    max_in_flight: int = 64,
) -> list[list[Message]]:
    """`count` conversations as `messages` lists, the tool's answers from really running each different program once.

    At most `max_in_flight` programs run at a time; one that was held up runs again, up to `TRIES` times. Raises
    SandboxError where one does not end as meant.
    """
    played = [Played(draft) for draft in draft_conversations(seed, count, teacher or TinyConfig())]
    room = asyncio.Semaphore(max_in_flight)
    results: dict[str, ToolResult] = {}

    async def run(code: str) -> ToolResult:
        async with room:
            result = await execute(ToolCall(code=code))
            for _ in range(TRIES - 1):
                if not _was_held_up(code, result):
                    break
                result = await execute(ToolCall(code=code))
            return result

    while ahead := [(one, call) for one in played if (call := one.next_call) is not None]:
        missing = [call for call in dict.fromkeys(call for _, call in ahead) if call not in results]
        results |= zip(missing, await asyncio.gather(*map(run, missing)), strict=True)
        for one, call in ahead:
            one.take(results[call])
    return [one.finished() for one in played]


def sample_texts() -> Iterator[str]:
    """Texts of the tiny world, for choosing a vocabulary; no program is run."""
    yield "user\nassistant\nsystem\n"
    yield '{"name": "python", "arguments": {"code": "'
    yield "\\boxed{"
    yield 'Traceback (most recent call last):\n  File "<tool>", line 1, in <module>\n' + " " * 12 + "^\n"
    yield from ERRORS * 40
    for draft in draft_conversations(0, 3000, TinyConfig()):
        yield draft.prompt
        for code in (draft.failing, *draft.calls):
            yield f'{code}"}}}}'
            yield f"    {code}\n"


ERRORS = (
    "NameError: name 'prin' is not defined. Did you mean: 'print'?\n",
    "  File \"<tool>\", line 1\nSyntaxError: closing parenthesis ')' does not match opening parenthesis '['\n",
    "AttributeError: module 'math' has no attribute 'print'\n",
    "NameError: name 'math' is not defined. Did you forget to import 'math'\n",
    "TypeError: 'int' object is not iterable\n",
    "TypeError: object of type 'int' has no len()\n",
    "ZeroDivisionError: integer division or modulo by zero\n",
    "Execution timed out.\n",
)
"""The last lines of failed calls, as Python and the sandbox write them."""
