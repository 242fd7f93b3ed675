"""Answers conversations, with a local engine or with a server of OpenAI's chat completions."""

import json
import secrets
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Protocol, cast

import aiohttp
from aiohttp.http import HttpProcessingError

from actors.generation.vllm_calls import VllmCalls
from actors.launch.changed_settings import different_settings
from actors.launch.start_model import model_context_tokens
from actors.talk.talk_tools import AnswerTools, TalkTools, begun, specs_of, talk_tools
from rstar_ray.agent.rollout import answer_calls
from rstar_ray.agent.talk import Message, TalkEvent, TalkLimits, as_written, talk
from rstar_ray.chat.chat_profile import THOUGHTS
from rstar_ray.chat.hub import local_folder
from rstar_ray.chat.instructions import opened, system_text
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.chat.protocol import with_protocol
from rstar_ray.chat.resolve import thinking_switches
from rstar_ray.chat.streamed import Streamed
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.chat.tool_calls import parse_tool_calls
from rstar_ray.config import ChatConfig, EvaluationConfig, RunConfig, ToolsConfig, own_environments, with_values
from rstar_ray.config.checks import at_least, check_bounds, within
from rstar_ray.config.rollout import TEMPERATURE
from rstar_ray.config.scales import at_scale, detect_scale, local_resources
from rstar_ray.errors import ConfigError, RStarError, one_line
from rstar_ray.tiny.tokenizer import CHAT_TEMPLATE
from rstar_ray.tools.spec import ToolSpec
from rstar_ray.trajectory import Sampling, StopReason, ToolCall

SERVER_SILENCE_S = 600.0
"""Longest time between two reads from a server during an answer."""
MAX_EVENT_BYTES = 2**22
"""Limit for one line of a server's stream."""
EVALUATION = EvaluationConfig()
"""Source of the defaults of a conversation."""


@dataclass(frozen=True, kw_only=True)
class TalkConfig:
    """Settings of a conversation."""

    max_tokens: Annotated[int, at_least(1)] = 8_192
    """of one answer, tool results included; with a server, tool results excluded [tokens]"""
    max_turns: Annotated[int, at_least(1)] = EVALUATION.max_turns
    """maximum completions per answer [turns]"""
    temperature: Annotated[float, TEMPERATURE] = EVALUATION.temperature
    """softmax temperature"""
    top_p: Annotated[float, within("(0, 1]")] = EVALUATION.top_p
    """nucleus mass"""
    own_folder: str = ""
    """folder with the modules of your own tools; empty is the current folder"""
    chat: ChatConfig = field(default_factory=ChatConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)

    def __post_init__(self) -> None:
        if own_environments(self.tools):
            raise ConfigError("--tools.environment", "a conversation has no environment: the user answers", "remove it")
        check_bounds("", self)


class Talker(Protocol):
    """Answers a conversation as a stream of pieces."""

    def answer(
        self, messages: Sequence[Message], *, max_tokens: int = 0, sampling: Sampling | None = None
    ) -> AsyncIterator[TalkEvent]: ...


@dataclass(frozen=True, kw_only=True)
class OwnTalker:
    """Answers with an engine in this process."""

    chat: TokenizerChat
    engine: Any  # actors.generation.engine.Engine
    tools: TalkTools
    config: TalkConfig
    context_tokens: int

    def answer(
        self, messages: Sequence[Message], *, max_tokens: int = 0, sampling: Sampling | None = None
    ) -> AsyncIterator[TalkEvent]:
        """`max_tokens` 0 and `sampling` None: use the configuration."""
        chosen = sampling or Sampling(temperature=self.config.temperature, top_p=self.config.top_p)
        name = secrets.token_hex(8)
        asked = 0

        def stream(prompt_ids: Sequence[int], *, max_tokens: int) -> AsyncGenerator[list[int], None]:
            nonlocal asked
            asked += 1
            return self.engine.stream(
                prompt_ids,
                request_id=f"talk-{name}/turn-{asked}",
                max_tokens=max_tokens,
                seed=secrets.randbits(62),
                sampling=chosen,
            )

        limits = TalkLimits(
            max_tokens=min(max_tokens or self.config.max_tokens, self.config.max_tokens),
            max_turns=self.config.max_turns,
            max_calls_per_turn=self.config.tools.max_calls_per_turn,
            context_tokens=self.context_tokens,
        )
        tools = self.tools.open(begun(f"talk-{name}", messages))
        return _closing(talk(messages, chat=self.chat, stream=stream, execute=tools.execute, limits=limits), tools)


async def _closing(talk: AsyncGenerator[TalkEvent, None], tools: AnswerTools) -> AsyncGenerator[TalkEvent, None]:
    """The pieces of `talk`; closes the tools when it ends or is closed."""
    try:
        async with aclosing(talk) as pieces:
            async for heard in pieces:
                yield heard
    finally:
        tools.close()


def run_config(folder: Path) -> RunConfig:
    """Training's settings, limited to this machine's and the model's resources."""
    scale, _ = detect_scale(local_resources())
    config = at_scale(RunConfig(stage="chat"), "gpu" if scale != "tiny" else "tiny", {})
    context = config.engine.max_context_tokens
    context = min(model_context_tokens(folder / "config.json") or context, context)
    values = {
        "engine.max_context_tokens": context,
        "engine.gpu_memory_share": 0.85,
        "engine.max_running": 64,
        "rollout.max_response_tokens": min(config.rollout.max_response_tokens, context - 1),
        "evaluate.max_response_tokens": min(config.evaluate.max_response_tokens, context - 1),
    }
    return with_values(config, values)


def chat_in(folder: Path, config: ChatConfig, tools: Sequence[ToolSpec]) -> TokenizerChat:
    """The chat of a model folder. Policies of scale tiny know their tool; other models get instructions for tools."""
    chat = load_chat(folder, config, instruct=False, tools=tools)
    if chat.tokenizer.chat_template == CHAT_TEMPLATE:
        return chat
    return load_chat(folder, config, instruct=True, tools=tools, syntax_of=VllmCalls)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A running engine, and the chat of its model."""

    chat: TokenizerChat
    engine: Any  # actors.generation.engine.Engine
    context_tokens: int


@asynccontextmanager
async def own_talker(model: str, config: TalkConfig) -> AsyncGenerator[OwnTalker, None]:
    """A talker with an engine for `model`, a folder or a Hugging Face id, and the tools; both end with the context."""
    specs = specs_of(config.tools, config.own_folder, config.chat)
    async with own_engine(model, config, specs) as served, talk_tools(specs, config.tools, config.own_folder) as tools:
        yield OwnTalker(
            chat=served.chat,
            engine=served.engine,
            tools=tools,
            config=config,
            context_tokens=served.context_tokens,
        )


@asynccontextmanager
async def own_engine(
    model: str, config: TalkConfig, specs: Sequence[ToolSpec] | None
) -> AsyncGenerator[ServedModel, None]:
    """An engine that serves `model`, a folder or a Hugging Face id; it ends with the context.

    Without `specs` clients define and run the tools.
    """
    folder = local_folder(model)
    if not (folder / "config.json").is_file():
        raise ConfigError("--model", f"{folder / 'config.json'} does not exist", "give a model's folder or a hub's id")
    chat, settings = chat_in(folder, config.chat, specs or ()), run_config(folder)
    # A conversation has no environment: the user takes its place.
    names = tuple(one.name for one in fields(ToolsConfig)) if specs is None else ("environment", "environments")
    but = [f"tools.{name}" for name in names]
    for line in different_settings(folder, config, but=but):
        print(line, file=sys.stderr, flush=True)  # stdout is for the policy's text
    from actors.generation.engine import Engine
    from actors.generation.served_adapter import adapter_to_serve

    adapter = adapter_to_serve(settings, folder, trained=False)
    engine = Engine(settings, folder, adapter=adapter, stop_token_ids=chat.profile.stop_token_ids)
    try:
        facts = await engine.start()
        yield ServedModel(chat=chat, engine=engine, context_tokens=facts.max_model_len)
    finally:
        await engine.close()


# ---------------------------------------------------------------- an external server


@dataclass(frozen=True, kw_only=True)
class ServerTalker:
    """Answers with a server of OpenAI's chat completions (`vllm serve ... --enable-auto-tool-choice
    --tool-call-parser ...`). Instructions are those of training; template, parser and stop tokens are the server's.
    """

    session: aiohttp.ClientSession
    url: str
    model: str
    tools: TalkTools
    config: TalkConfig

    async def answer(
        self, messages: Sequence[Message], *, max_tokens: int = 0, sampling: Sampling | None = None
    ) -> AsyncIterator[TalkEvent]:
        """Tool calls of the server's model run in this process."""
        tools = self.tools.open(begun(f"talk-{secrets.token_hex(8)}", messages))
        try:
            async for heard in self._answer(messages, tools, max_tokens=max_tokens, sampling=sampling):
                yield heard
        finally:
            tools.close()

    async def _answer(
        self, messages: Sequence[Message], tools: AnswerTools, *, max_tokens: int, sampling: Sampling | None
    ) -> AsyncIterator[TalkEvent]:
        chosen = sampling or Sampling(temperature=self.config.temperature, top_p=self.config.top_p)
        chat = with_protocol(self.config.chat)
        messages = opened(messages, system_text(chat, self.tools.specs, instruct=True), chat.before)
        said: list[Message] = []
        stop, num_tokens, most = StopReason.MAX_TURNS, 0, max_tokens or self.config.max_tokens
        for _ in range(self.config.max_turns):
            if num_tokens >= most:
                stop = StopReason.TRUNCATED
                break
            turn = _Turn()
            try:
                async for heard in self._turn([*messages, *said], turn, most - num_tokens, chosen):
                    yield heard
            except (aiohttp.ClientError, HttpProcessingError, TimeoutError) as failed:
                raise RStarError(f"{self.url} failed: {one_line(failed)}") from failed
            num_tokens += turn.num_tokens
            said.append(turn.message())
            if not turn.calls:
                stop = StopReason.TRUNCATED if turn.finish == "length" else StopReason.ANSWERED
                break
            asked = [turn.calls[number] for number in sorted(turn.calls)]
            calls = [_call(call, self.tools.specs) for call in asked]
            results = await answer_calls(calls, tools.execute, most=self.config.tools.max_calls_per_turn)
            for written, call, result in zip(asked, calls, results, strict=True):
                yield TalkEvent(kind="call", text=as_written(call))
                yield TalkEvent(kind="result", text=result.text, failed=result.outcome.failed)
                said.append({"role": "tool", "tool_call_id": written["id"], "content": result.text})
        yield TalkEvent(kind="end", text=stop.value, num_tokens=num_tokens, messages=tuple(said))

    async def _turn(
        self, messages: Sequence[Message], turn: "_Turn", max_tokens: int, sampling: Sampling
    ) -> AsyncIterator[TalkEvent]:
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            **({"tools": [tool.as_schema() for tool in self.tools.specs]} if self.tools.specs else {}),
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if self.config.chat.thinking != "auto":
            asked["chat_template_kwargs"] = thinking_switches(self.config.chat.thinking)
        async with self.session.post(f"{self.url}/chat/completions", json=asked) as response:
            if response.status != 200:
                said = _line(await response.text(errors="replace"))
                ours = response.status == 400 and not self.config.chat.system and messages[0]["role"] == "system"
                hint = "; --chat.system none sends it no instructions" if ours else ""  # some templates reject them
                raise RStarError(f"{self.url} answered {response.status}: {said}{hint}")
            async for line in response.content:
                data = line.decode("utf-8", "replace").removeprefix("data:").strip()
                if not line.startswith(b"data:") or data == "[DONE]":
                    continue
                event = _event(data, self.url)
                try:
                    shown = turn.take(event)
                except (TypeError, ValueError, AttributeError) as other:
                    raise RStarError(f"{self.url} sent a malformed event: {_line(data)}") from other
                for kind, text in shown:
                    yield TalkEvent(kind=kind, text=text)
            if not turn.num_events:
                raise RStarError(f"{self.url} streams no answer: it sent {response.content_type}, and no event")
            for kind, text in turn.rest():
                yield TalkEvent(kind=kind, text=text)


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


def _event(data: str, url: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError as error:
        raise RStarError(f"{url} sent invalid JSON: {data[:100]!r}") from error
    except RecursionError:
        raise RStarError(f"{url} sent JSON that is nested too deeply: {data[:100]!r}") from None
    if not isinstance(event, dict) or cast(dict[str, Any], event).get("error"):
        raise RStarError(f"{url} failed: {_line(data)}")
    return cast(dict[str, Any], event)


class _Turn:
    """One turn, assembled from a server's events.

    A server without a reasoning parser sends thoughts as part of the content.
    """

    def __init__(self) -> None:
        self._view = Streamed(THOUGHTS[0], inside=False)
        self.said = ""
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish = ""
        self.num_tokens = 0
        self.num_events = 0

    def take(self, event: Mapping[str, Any]) -> list[tuple[Any, str]]:
        """Add an event; returns (kind, text) pairs that can be shown now."""
        shown: list[tuple[Any, str]] = []
        self.num_events += 1
        for choice in event.get("choices") or []:
            delta: dict[str, Any] = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            if thought:
                shown.append(("thought", str(thought)))
            if delta.get("content"):
                self.said += str(delta["content"])
                shown += [(kind.value, words) for kind, words in self._view.feed(str(delta["content"]))]
            self.num_tokens += bool(thought or delta)
            for part in delta.get("tool_calls") or []:
                call = self.calls.setdefault(int(part.get("index", 0)), {"id": "", "name": "", "arguments": ""})
                function: dict[str, Any] = part.get("function") or {}
                call["id"] = part.get("id") or call["id"]
                call["name"] += function.get("name") or ""
                call["arguments"] += function.get("arguments") or ""
            self.finish = choice.get("finish_reason") or self.finish
        return shown

    def rest(self) -> list[tuple[Any, str]]:
        """Text held back because it could have been part of a thought's delimiter."""
        return [(kind.value, words) for kind, words in self._view.end()]

    def message(self) -> Message:
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for _, call in sorted(self.calls.items())
        ]
        return {"role": "assistant", "content": self.said, **({"tool_calls": calls} if calls else {})}


def _call(call: Mapping[str, Any], tools: Sequence[ToolSpec]) -> ToolCall:
    """Parse the call with our own syntax, so that errors in it have the same messages."""
    arguments = call["arguments"] or "{}"
    written = f'<tool_call>{{"name": {json.dumps(call["name"])}, "arguments": {arguments}}}</tool_call>'
    return parse_tool_calls(written, tools={tool.name: tool for tool in tools})[0]


def _first_model(listed: Any) -> str:
    """The id of the first listed model; empty if there is none."""
    models: Any = cast(dict[str, Any], listed).get("data") if isinstance(listed, dict) else None
    first: Any = cast(list[Any], models)[0] if isinstance(models, list) and models else None
    return str(cast(dict[str, Any], first).get("id") or "") if isinstance(first, dict) else ""


@asynccontextmanager
async def server_talker(url: str, token: str, config: TalkConfig) -> AsyncGenerator[ServerTalker, None]:
    """A talker with the server's first model. Raises `ConfigError` if it does not answer as an OpenAI-like server."""
    url = url.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SERVER_SILENCE_S)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    fresh = aiohttp.TCPConnector(force_close=True)  # servers close connections that are idle while the user types
    async with aiohttp.ClientSession(
        timeout=timeout, headers=headers, read_bufsize=MAX_EVENT_BYTES, connector=fresh
    ) as session:
        try:
            async with session.get(f"{url}/models") as response:
                listed = await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError) as failed:
            raise ConfigError(
                "--server", f"{url} does not answer ({failed})", "start it, or check the address"
            ) from failed
        name = _first_model(listed)
        if not name:
            raise ConfigError("--server", f"{url}/models lists no model", "give the address of an OpenAI-like server")
        specs = specs_of(config.tools, config.own_folder, config.chat)
        async with talk_tools(specs, config.tools, config.own_folder) as tools:
            yield ServerTalker(session=session, url=url, model=name, tools=tools, config=config)
