"""Our prompts and continuations against those of the package `renderers`, on templates that both know.

`pip install --target renderers --no-deps renderers prime-pydantic-config openai-harmony tiktoken`, and that folder in
PYTHONPATH.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from rstar_ray.agent.token_lines import TokenLines
from rstar_ray.chat.resolve import resolve
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import ChatConfig
from tests.rstar_ray.chat.families import FAMILIES, generation_of, tokenizer_of
from tests.rstar_ray.test_token_lines import TOOLS, Harness

renderers = pytest.importorskip("renderers")
pytestmark = pytest.mark.slow

NAMES = {"qwen3": "qwen3", "qwen3.5": "qwen3.5", "qwen3.6": "qwen3.6", "llama3.1": "llama-3", "glm4.5": "glm-4.5"}
"""Our family, and their renderer. Their DeepSeek-V3 renders no tools."""
MORE_TOKENS = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "/nothink"),
)
"""Tokens of the real tokenizers that the families here lack."""
CONVERSATIONS = 200


def chat_of(name: str) -> TokenizerChat:
    family = replace(FAMILIES[name], tags=(*FAMILIES[name].tags, *MORE_TOKENS))
    profile = resolve(tokenizer_of(family), generation_of(family), ChatConfig())
    return TokenizerChat(tokenizer_of(family), profile, tools=[], shows_tools=True)


def renderer_of(family: str, tokenizer: Any) -> Any:
    config = renderers.config_from_name(NAMES[family])
    return renderers.create_renderer(tokenizer, type(config)(thinking_retention="all"))


@pytest.mark.parametrize("family", NAMES)
def test_a_conversation_has_the_tokens_of_the_other_renderer(family: str):
    chat, compared = chat_of(family), 0
    other = renderer_of(family, chat.tokenizer)
    for seed in range(CONVERSATIONS):
        harness = Harness(family, random.Random(f"{family}/{seed}"))
        harness.chat, harness.lines = chat, TokenLines(chat)
        if harness.rng.random() < 0.5:
            harness.messages.insert(0, {"role": "system", "content": "Be brief."})
        new = list(harness.messages)
        for turn in range(4):
            message = harness.ask(harness.rewritten())
            ours, theirs = harness.places[-1].prompt_ids, None
            if turn == 0:
                theirs = other.render_ids(new, tools=TOOLS, add_generation_prompt=True)
            else:
                before, sampled = harness.places[-2].prompt_ids, harness.sampled[-2]
                if family == "glm4.5" and sampled[-1] not in chat.profile.stop_token_ids:
                    break  # theirs closes a cut turn with <|endoftext|>, which the template never writes
                bridged = other.bridge_to_next_turn(before, sampled, new, tools=TOOLS)
                theirs = None if bridged is None else bridged.token_ids
            if theirs is not None:
                compared += 1
                decode = chat.tokenizer.decode
                assert ours == theirs, f"{seed}/{turn}\nours\n{decode(ours)!r}\ntheirs\n{decode(theirs)!r}"
            new = harness.reply(message)
            harness.messages += [message, *new]
    assert compared > 2 * CONVERSATIONS
