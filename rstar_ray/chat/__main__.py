"""Shows a model's chat format and its problems: `python -m rstar_ray.chat MODEL`, a folder or a Hugging Face id.

Shows the start and end of turns, the stop tokens, the format of tools and calls, and whether the model reasons. Then
shows a training conversation (tokens with a loss in brackets), and the prompt of one problem. Exit status 2 if the
model or its template cannot be used; the message has the fix.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from rstar_ray.chat.hub import local_folder
from rstar_ray.chat.load_chat import GENERATION, load_chat
from rstar_ray.chat.render import CALL_ID
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import ChatConfig
from rstar_ray.config.options import options_of
from rstar_ray.data.conversation import Conversation, RowError
from rstar_ray.data.sft import Row, render
from rstar_ray.errors import ConfigError
from rstar_ray.exit_status import exit_status_of
from rstar_ray.tools.spec import PYTHON_TOOL
from rstar_ray.trajectory import Problem

OPEN, CLOSE = "⟦", "⟧"


@dataclass(frozen=True)
class Options:
    """Options of `python -m rstar_ray.chat`."""

    model: Annotated[str, tyro.conf.Positional]
    """a folder, or a Hugging Face id"""
    chat: ChatConfig = field(default_factory=ChatConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a model's chat format; exit status 0 if it can be used."""
    return exit_status_of(lambda: show(argv))


def show(argv: Sequence[str] | None) -> None:
    """Raises `ConfigError` if the model or its template cannot be used."""
    try:
        options = options_of(Options, argv, program="python -m rstar_ray.chat", description=__doc__)
        folder = local_folder(options.model, weights=False)
        if not folder.is_dir():
            raise ConfigError("--model", f"there is no folder {options.model!r}", "give a model's folder or a hub's id")
        chat = load_chat(folder, options.chat, instruct=True)
        for line in described(chat, folder):
            print(line)
    except ConfigError as refused:
        if refused.field != "--model":
            raise
        raise ConfigError("MODEL", refused.problem, refused.hint) from refused  # here it is not an option


def described(chat: TokenizerChat, folder: Path) -> Iterator[str]:
    """The output, line by line."""
    profile, template = chat.profile, chat.profile.template
    yield f"model             {folder}"
    yield f"template          {profile.template_source}"
    yield f"a turn begins     {profile.opening!r}"
    yield f"a turn ends       {profile.answer_end!r}" + (
        f", and with {profile.call_end!r} where it calls" if profile.call_end != profile.answer_end else ""
    )
    yield "stop tokens       " + ", ".join(f"{text!r} ({token_id})" for token_id, text in profile.stop_tokens)
    yield f"system text       {'in a separate turn' if template.has_system else 'before the first question'}"
    yield f"tools             {'shown by the template' if template.shows_tools else 'described in the system text'}"
    yield f"calls             {profile.syntax}, written by {'the template' if template.writes_calls else 'rstar_ray'}"
    yield f"results           {'as the template writes them' if template.has_tool_role else 'in a message of the user'}"
    yield f"reasoning         {_thinks(chat)}"
    rows: Sequence[Row] = []
    try:
        rows = render(chat, example(thinks=profile.thinks != "off"))
    except RowError as refused:
        yield f"note: SFT excludes such conversations: {refused}; give --chat.template"
    for note in notes(chat, folder, rows):
        yield f"note: {note}"
    for number, row in enumerate(rows, 1):
        yield f"--- a training conversation, row {number} of {len(rows)} for SFT: {OPEN}tokens with a loss{CLOSE}"
        yield "".join(f"{OPEN}{piece.text}{CLOSE}" if piece.sampled else piece.text for piece in row)
    yield "--- the prompt of one problem, in RL, evaluations and chat: SFT conversations should begin like this"
    yield chat.decode(chat.prompt_ids(Problem(id="", problem="What is 17 + 5?", answer="22")))


def _thinks(chat: TokenizerChat) -> str:
    profile = chat.profile
    said = {
        "prefilled": f"in {profile.thought.opens}, which the prompt opens",
        "may": f"optional, in {profile.thought.opens}",
        "off": f"no: the prompt closes {profile.thought.opens}",
        "no": f"not by the template; {profile.thought.opens} is recognised anyway",
    }[profile.thinks]
    held = "; calls inside it count" if profile.thought.holds_calls else "; calls and answers inside it do not count"
    return said + held + ("; --chat.thinking switches" if profile.has_thinking_switch else "")


def notes(chat: TokenizerChat, folder: Path, rows: Sequence[Row]) -> Iterator[str]:
    """Problems that do not stop a run, and how to fix them."""
    profile, tokenizer = chat.profile, chat.tokenizer
    asked = chat.decode(chat.prompt_ids(Problem(id="", problem="x", answer="")))
    end = profile.answer_end.strip()
    if tokenizer.eos_token != end:
        yield f"the tokenizer ends texts with {tokenizer.eos_token!r}, the template turns with {end!r}: both stop here"
    path = folder / GENERATION
    named: Any = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
    if missing := set(profile.stop_token_ids) - set(named if isinstance(named, list) else [named]):
        texts = ", ".join(repr(text) for token_id, text in profile.stop_tokens if token_id in missing)
        yield f"{GENERATION} does not name {texts}: other servers of this folder do not stop there; an export adds it"
    if profile.syntax.startswith("vllm:"):
        parser = profile.syntax.removeprefix("vllm:")
        yield f"calls are read by vLLM's parser {parser!r}, which a run looks for, and not this command"
    if not profile.template.shows_tools:
        yield "the template ignores tools: they are described in the system text, or give --chat.template"
    if profile.template.wants_ids:
        yield f"the template requires call ids: each call and its result have {CALL_ID!r}, whatever id the model writes"
    bos = tokenizer.bos_token
    if bos and tokenizer("x")["input_ids"][:1] == [tokenizer.bos_token_id] and not asked.startswith(bos):
        yield f"the tokenizer begins texts with {bos!r}, the template does not: prompts begin without it"
    if len(rows) > 1:
        yield "the template rewrites earlier turns: SFT makes several rows of a conversation, each turn trained on once"


def example(*, thinks: bool = True) -> Conversation:
    """An example: a question with a call and its result, and a second question."""
    first, last = ({"reasoning_content": text} if thinks else {} for text in ("I compute it.", "That is it."))
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "print(17 + 5)"}}}
    return Conversation(
        name="example",
        tools=[PYTHON_TOOL.as_schema()],
        messages=[
            {"role": "user", "content": "What is 17 + 5?"},
            {"role": "assistant", "content": "", "tool_calls": [call], **first},
            {"role": "tool", "content": "22"},
            {"role": "assistant", "content": "<answer>\\boxed{22}</answer>", **last},
            {"role": "user", "content": "Thank you."},
            {"role": "assistant", "content": "Gladly."},
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
