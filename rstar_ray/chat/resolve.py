"""Finds a model's chat format once, from its template, tokenizer and generation config.

Everything is found by rendering small conversations and looking at the result. What does not fit is a
`ConfigError` with the fix, before anything starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from rstar_ray.chat.call_syntax import HERMES, SYNTAXES, CallSyntax, Marked, WrittenCall
from rstar_ray.chat.chat_profile import THOUGHTS, ChatProfile, Frame, TemplateFacts, Thought
from rstar_ray.chat.render import Message, Renderer
from rstar_ray.config import ChatConfig
from rstar_ray.errors import ConfigError, one_line

USER, SAID, RESULT, SECOND = "\u2402user\u2403", "\u2402said\u2403", "\u2402result\u2403", "\u2402second\u2403"
PROBE_NAME = "probe_tool"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "looks",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
PROBE_ARGUMENTS = {"code": f'print("{SAID}")\nx = 1'}
KNOWS_ALL = TemplateFacts(
    has_system=True,
    shows_tools=True,
    writes_calls=True,
    has_tool_role=True,
    arguments_as_text=False,
    keeps_thoughts=True,
)
_CALLS_MAY_WANT: tuple[dict[str, bool], ...] = (
    {},
    {"arguments_as_text": True},
    {"wants_ids": True},
    {"wants_ids": True, "arguments_as_text": True},
)


def resolve(tokenizer: Any, generation: Mapping[str, Any], config: ChatConfig) -> ChatProfile:
    """The profile of a model; raises `ConfigError` for what does not fit together.

    `generation` is generation_config.json, for its `eos_token_id`. The template is `tokenizer.chat_template`.
    """
    named = getattr(tokenizer, "chat_template", None)
    if isinstance(named, dict):  # several named templates: transformers chooses between these two itself
        several = cast(dict[str, str], named)
        tokenizer.chat_template = several.get("tool_use") or several.get("default")
        if not tokenizer.chat_template:
            problem = f"the tokenizer has the templates {', '.join(several)}, and none called tool_use or default"
            raise ConfigError("--chat.template", problem, "give one, a file in jinja")
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("--chat.template", "the tokenizer has no chat template", "give one, a file in jinja")
    return _TemplateProbe(tokenizer, generation, config).profile()


VLLM_PARSERS = {
    "<|tool_call_start|>[": "lfm2",
    "<|tool_call>call:": "gemma4",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<atem:function_calls>": "muse_glimmer",
    "<seed:tool_call>": "seed_oss",
    "<minimax:tool_call>": "minimax_m2",
    "functools[": "phi4_mini_json",
    "<|action_start|>": "internlm",
    "<tool_calls>": "hunyuan_a13b",
}
"""For some families whose calls are not parsed here: the beginning of their calls, and vLLM's parser for them."""


def for_tools(profile: ChatProfile, names: Sequence[str]) -> ChatProfile:
    """The profile with these tools; raises `ConfigError` where the template writes the name of the tool into each of
    its results, and there are several.
    """
    frame = profile.tool_frame
    if PROBE_NAME not in frame.head + frame.tail + profile.tool_separator or not names:
        return profile
    if len(names) > 1:
        hint = "use one tool, or give a template that does not"
        raise ConfigError("--chat.template", f"it names the tool in each result, and {len(names)} are in use", hint)
    head, tail, separator = (
        text.replace(PROBE_NAME, names[0]) for text in (frame.head, frame.tail, profile.tool_separator)
    )
    return replace(profile, tool_frame=replace(frame, head=head, tail=tail), tool_separator=separator)


def thinking_switches(thinking: str) -> dict[str, bool]:
    """Template variables of the thinking switch, under both names in use; empty for auto."""
    return {} if thinking == "auto" else {"enable_thinking": thinking == "on", "thinking": thinking == "on"}


class _TemplateProbe:
    """Examines one template by rendering conversations."""

    def __init__(self, tokenizer: Any, generation: Mapping[str, Any], config: ChatConfig) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._config = config
        self._switches = thinking_switches(config.thinking)
        self._added: dict[str, int] = {
            str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        self._facts = KNOWS_ALL
        self._syntax: CallSyntax = HERMES
        self._thought = THOUGHTS[0]

    def profile(self) -> ChatProfile:
        opening = self._opening()
        switch = self._has_thinking_switch()
        self._thought = self._find_thought(opening)
        self._facts = self._find_facts()
        answer_end = self._answer_end()
        named = self._find_syntax(answer_end)
        stops = self._stop_tokens(answer_end)
        call_end, frame, separator = self._tool_frame(answer_end, stops)
        prefilled = opening.rstrip().endswith(self._thought.opens)
        stops |= {self._token_id(call_end): call_end.strip()}
        return ChatProfile(
            template=self._facts,
            template_source=self._config.template or "the tokenizer's own",
            opening=opening,
            answer_end=answer_end,
            call_end=call_end,
            stop_tokens=tuple(sorted(stops.items())),
            syntax=named,
            thought=self._thought,
            thinks=self._thinks(opening, switch),
            has_thinking_switch=switch,
            prefill=opening[opening.rindex(self._thought.opens) :] if prefilled else "",
            tool_frame=frame,
            tool_separator=separator,
        )

    # -- rendering ----------------------------------------------------------------------------------------------------
    def _render(
        self, *messages: Message, tools: bool = False, opens: bool = False, facts: TemplateFacts | None = None
    ) -> str:
        """Render; raises the template's errors."""
        renderer = Renderer(self._tokenizer, facts or self._facts, self._syntax, self._thought, switches=self._switches)
        return renderer.render(messages, [PROBE_TOOL] if tools else None, opens=opens)

    def _rendered(self, *messages: Message, facts: TemplateFacts, tools: bool = False) -> str:
        """Render; empty if the template raises."""
        try:
            return self._render(*messages, tools=tools, facts=facts)
        except Exception:  # a template may raise any exception
            return ""

    # -- how a turn begins --------------------------------------------------------------------------------------------
    def _opening(self) -> str:
        try:
            closed, opened = self._render(_user()), self._render(_user(), opens=True)
        except Exception as error:
            raise ConfigError(
                "--chat.template", f"it cannot write a question ({one_line(error)})", "give another"
            ) from error
        if USER not in opened and USER in self._rendered(_user_in_parts(), facts=self._facts):
            raise ConfigError(
                "--chat.template", "it accepts message content only as a list of parts", "give one that takes text"
            )
        if USER not in opened:
            raise ConfigError("--chat.template", "it leaves out the user's message", "give another")
        if opened.count(USER) > 1:
            raise ConfigError("--chat.template", "it writes the user's message more than once", "give another")
        opening = opened[self._whole(opened, _shared(closed, opened)) :]
        if not opening and not self._opened_by_the_question(closed):
            raise ConfigError(
                "--chat.template", "it writes nothing for `add_generation_prompt`", "let it open the assistant's turn"
            )
        return opening

    def _opened_by_the_question(self, closed: str) -> bool:
        """Whether the assistant's text follows immediately, as after `[/INST]`."""
        head, found, _ = self._rendered(_user(), _said(SAID), facts=self._facts).partition(SAID)
        return bool(found) and head.rstrip() == closed.rstrip()

    def _whole(self, text: str, position: int) -> int:
        """`position`, or the beginning of the token that it would cut."""
        ends = ((text.rfind(token, 0, position + len(token) - 1), len(token)) for token in self._added)
        return min((at for at, length in ends if 0 <= at < position < at + length), default=position)

    def _has_thinking_switch(self) -> bool:
        def shown(thinking: str) -> str:
            return self._tokenizer.apply_chat_template(
                [_user()], add_generation_prompt=True, tokenize=False, **thinking_switches(thinking)
            )

        differs = shown("on") != shown("off")
        if self._config.thinking != "auto" and not differs:
            raise ConfigError(
                "--chat.thinking", "the chat template has no switch for it", "leave it out, or give --chat.template"
            )
        return differs

    def _find_thought(self, opening: str) -> Thought:
        source = str(self._tokenizer.chat_template)
        for place in (opening, source, self._added):
            for thought in THOUGHTS:
                if thought.opens in place:
                    return thought
        return THOUGHTS[0]

    def _thinks(self, opening: str, switch: bool) -> Any:
        thought = self._thought
        if opening.rstrip().endswith(thought.opens):
            return "prefilled"
        if opening.rstrip().endswith(thought.closes):
            return "off"
        known = thought.opens in str(self._tokenizer.chat_template) or thought.opens in self._added
        return "may" if switch or known else "no"

    # -- what the template knows --------------------------------------------------------------------------------------
    def _find_facts(self) -> TemplateFacts:
        facts = KNOWS_ALL
        if "\u2402system\u2403" not in self._rendered(_system("\u2402system\u2403"), _user(), facts=facts):
            facts = replace(facts, has_system=False)
        if PROBE_NAME not in self._rendered(_user(), facts=facts, tools=True):
            facts = replace(facts, shows_tools=False)
        thinking = {**_said("so"), "reasoning_content": SAID}
        if SAID not in self._rendered(_user(), thinking, facts=facts):
            facts = replace(facts, keeps_thoughts=False)
        facts = self._find_call_facts(facts)
        results = (_user(), _calling(), _result(RESULT), _result(SECOND))
        rendered = self._rendered(*results, facts=facts)
        if RESULT not in rendered or SECOND not in rendered:
            facts = replace(facts, has_tool_role=False)
        return facts

    def _find_call_facts(self, facts: TemplateFacts) -> TemplateFacts:
        """How calls are passed to the template: as objects, with arguments as text, with an id, or as the
        assistant's words.
        """
        for asked in _CALLS_MAY_WANT:
            candidate = replace(facts, **asked)
            if PROBE_NAME in self._rendered(_user(), _calling(), _result(RESULT), facts=candidate):
                return candidate
            if PROBE_NAME in self._rendered(_user(), _calling(), facts=candidate) and not self._rendered(
                _user(), _calling(), _result(RESULT), facts=replace(candidate, wants_ids=True)
            ):
                return candidate
        return replace(facts, writes_calls=False)

    def _find_syntax(self, answer_end: str) -> str:
        """The syntax that parses what the template writes, or the configured one."""
        asked = self._config.parser
        if asked.startswith("vllm:"):
            return asked
        if asked != "auto" and asked not in SYNTAXES:
            raise ConfigError(
                "--chat.parser", f"{asked!r} is not a parser", f"choose {', '.join(SYNTAXES)} or vllm:<its name there>"
            )
        if asked != "auto":
            self._syntax = SYNTAXES[asked]
            return asked
        if not self._facts.writes_calls:
            return HERMES.name
        rendered = self._rendered(_user(), _calling(), facts=self._facts)
        if PROBE_NAME not in rendered:  # only once it has its result
            rendered = self._rendered(_user(), _calling(), _result(RESULT), facts=self._facts)
        said = rendered.split(USER, 1)[-1]
        said = said[: said.rfind(answer_end)] if answer_end in said else said
        for syntax in SYNTAXES.values():
            for begin in range(len(said)):
                if syntax.read(said[begin:])[:1] == [WrittenCall(PROBE_NAME, PROBE_ARGUMENTS)]:
                    self._syntax = syntax
                    return syntax.name
                if isinstance(syntax, Marked):
                    break  # its marker may be at any position
        said = rendered.split(USER, 1)[-1]
        known = next((name for begins, name in VLLM_PARSERS.items() if begins in said), "")
        hint = f"give one: {', '.join(SYNTAXES)}, or vllm:<the name of one of vLLM's tool parsers>"
        raise ConfigError(
            "--chat.parser",
            f"no parser reads the calls that this template writes ({_excerpt(said, PROBE_NAME)!r})",
            f"vLLM has one: vllm:{known}" if known else hint,
        )

    # -- how a turn ends ----------------------------------------------------------------------------------------------
    def _answer_end(self) -> str:
        """The text after the assistant's last word: blanks, and the one token that ends the turn."""
        try:
            rendered = self._render(_user(), _said(SAID), {"role": "user", "content": "and now"})
        except Exception as error:
            raise ConfigError(
                "--chat.template", f"it cannot write an assistant's turn ({one_line(error)})", "give another"
            ) from error
        _, found, rest = rendered.partition(SAID)
        if not found:
            raise ConfigError("--chat.template", "it leaves out the assistant's message", "give another")
        token = self._token_at_start(rest)
        if token:
            return rest[: rest.index(token) + len(token)]
        for chosen in self._config.stop:
            return chosen
        raise ConfigError(
            "--chat.stop",
            f"the template ends an assistant's turn with {_excerpt(rest, '')!r}, which no single token of the "
            "tokenizer begins",
            "give the token that ends a turn, or the --chat.template that belongs to this tokenizer",
        )

    def _token_at_start(self, text: str) -> str:
        text = text.lstrip()
        return max((token for token in self._added if text.startswith(token)), key=len, default="")

    def _token_id(self, text: str) -> int:
        text = text.strip()
        if text in self._added:
            return self._added[text]
        ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        if len(ids) != 1:
            raise ConfigError(
                "--chat.stop", f"{text!r} is not a single token of the tokenizer", "give one of its vocabulary"
            )
        return ids[0]

    def _stop_tokens(self, answer_end: str) -> dict[int, str]:
        """Stop tokens by id: end of turn, those of generation_config, the tokenizer's end token, and the
        configured ones.
        """
        named = self._generation.get("eos_token_id")
        ids = [named] if isinstance(named, int) else list(cast(list[int], named or []))
        own = self._tokenizer.eos_token_id
        ids += [own] if own is not None else []
        ids += [self._token_id(text) for text in (answer_end, *self._config.stop)]
        return {token_id: str(self._tokenizer.convert_ids_to_tokens(token_id)) for token_id in ids}

    def _tool_frame(self, answer_end: str, stops: Mapping[int, str]) -> tuple[str, Frame, str]:
        """The end of a turn with calls, the frame of its results until the policy continues, and the text
        between two results.
        """
        padded = f" \n{RESULT}\n "
        try:
            rendered = self._render(_user(), _calling(), _result(padded), _result(SECOND), opens=True)
            alone = self._render(_user(), _calling(), _result(RESULT), opens=True)
        except Exception as error:
            raise ConfigError(
                "--chat.template", f"it cannot write the results of a tool ({one_line(error)})", "give another"
            ) from error
        before, _, after = rendered.partition(RESULT)
        between, _, _ = after.partition(SECOND)
        quotes = before.endswith('" \\n')
        if quotes:
            before, between = before.removesuffix('" \\n'), between.removeprefix('\\n "').removesuffix('"')
        trims = not quotes and not before.endswith(" \n")
        if not trims and not quotes:
            before, between = before.removesuffix(" \n"), between.removeprefix("\n ")
        tail = alone.partition(RESULT)[2]
        tail = tail.removeprefix('"') if quotes else tail
        called = before[before.rindex(SAID) + len(SAID) :]
        for end in (answer_end, *(stops[token_id] for token_id in stops)):
            if end in called:
                head = called[called.index(end) + len(end) :]
                return end, Frame(head, tail, trims=trims, quotes=quotes), between
        if self._config.stop:  # the template's end does not count
            call_text = called[: _shared(self._render(_user(), _calling()).rpartition(SAID)[2], called)].rstrip()
            return answer_end, Frame(called[len(call_text) :], tail, trims=trims, quotes=quotes), between
        raise ConfigError(
            "--chat.stop",
            f"the template ends a turn that calls a tool with {_excerpt(called[-60:], '')!r}, where nothing stops",
            "give the token that ends it",
        )


def _shared(one: str, other: str) -> int:
    """The common prefix of two texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _excerpt(text: str, around: str) -> str:
    start = max(0, text.find(around) - 30) if around else 0
    return text[start : start + 80]


def _user() -> dict[str, Any]:
    return {"role": "user", "content": USER}


def _user_in_parts() -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": USER}]}


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _calling() -> dict[str, Any]:
    call = {"type": "function", "function": {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": PROBE_NAME}
