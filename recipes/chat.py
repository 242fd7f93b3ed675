"""Chat with a policy: reasoning, calls, results and answer are streamed; its tools run here, programs in the sandbox.

python recipes/chat.py --model runs/tiny/checkpoints/stage3-step-000025/model --prompt "What is 12 * 34?"
RSTAR_RAY_TOKEN=... python recipes/chat.py --server http://127.0.0.1:8000
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from actors.launch.exit_status import status_of
from actors.talk.http_listener import given_token
from actors.talk.talker import TalkConfig, Talker, own_talker, server_talker
from rstar_ray.agent.talk import Message
from rstar_ray.config import ChatConfig
from rstar_ray.config.options import options_of
from rstar_ray.deadline import in_thread
from rstar_ray.errors import ConfigError

QUESTION_S = 30 * 86_400.0
"""Longest wait for the next question."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions(TalkConfig):
    """The policy, and the question."""

    model: str = ""
    """a model's folder, or a hub's id: served here"""
    server: str = ""
    """instead of --model: address of a server of OpenAI's chat completions"""
    prompt: str = ""
    """one question; empty is a conversation, until an empty line or the end of the input"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.model) == bool(self.server):
            raise ConfigError("--model", "one of --model and --server is needed", "give either")
        if self.server:
            for name in ("template", "parser", "stop"):
                if getattr(self.chat, name) != getattr(ChatConfig(), name):
                    raise ConfigError(f"--chat.{name}", "the server has its own", "leave it out, or give it there")


class Screen:
    """A terminal: thoughts dim, programs highlighted, results framed; plain text elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._kind = ""

    def show(self, kind: str, text: str, *, failed: bool = False) -> None:
        """Write one event; consecutive pieces of a kind continue the text."""
        from rich.panel import Panel
        from rich.syntax import Syntax
        from rich.text import Text

        if kind != self._kind and self._kind in ("thought", "said"):
            self._console.print()
        self._kind = kind
        if kind in ("thought", "said"):
            self._console.print(Text(text, style="dim italic" if kind == "thought" else ""), end="")
        elif kind == "call":
            self._console.print(Syntax(text, "python", background_color="default"))
        elif kind == "result":
            self._console.print(Panel(Text(text), title="result", border_style="red" if failed else "green"))
        elif text != "answered":
            self._console.print(Text(f"[{text.replace('_', ' ')}]", style="yellow"))

    def end(self) -> None:
        """After an answer."""
        if self._kind in ("thought", "said"):
            self._console.print()
        self._kind = ""


async def converse(talker: Talker, options: ChatOptions, screen: Screen) -> None:
    """One question, or one after the other."""
    messages: list[Message] = []
    while question := options.prompt or await in_thread(
        _ask, QUESTION_S, waiter="rstar chat", owner="the user", reason="the next question"
    ):
        messages.append({"role": "user", "content": question})
        async for heard in talker.answer(messages):
            screen.show(heard.kind, heard.text, failed=heard.failed)
            messages += heard.messages
        screen.end()
        if options.prompt:
            return


def _ask() -> str:
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            return input("> ").strip()
        except EOFError:
            return ""
    print("> ", end="", flush=True)
    line = bytearray()  # sys.stdin is not used: a thread that still reads it would hold its lock at the process's end
    while (one := os.read(0, 1)) not in (b"", b"\n"):
        line += one
    return line.decode("utf-8", "replace").strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 it failed, 2 refused before anything started, 130 ended by Ctrl-C."""
    return status_of(lambda: asyncio.run(_talk(options_of(ChatOptions, argv, description=__doc__))))


async def _talk(options: ChatOptions) -> None:
    place: AbstractAsyncContextManager[Any] = (
        server_talker(options.server, given_token(), options) if options.server else own_talker(options.model, options)
    )
    async with place as talker:
        await converse(talker, options, Screen())


if __name__ == "__main__":
    sys.exit(main())
