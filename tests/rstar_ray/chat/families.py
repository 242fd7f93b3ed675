"""Tokenizers of the families of chat models: real templates, as TRL ships them, control tokens, and bytes."""

import json
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rstar_ray.chat.resolve import resolve
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import ChatConfig

QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>",
)  # fmt: skip
DEEPSEEK = tuple(
    f"<｜{name.replace(' ', '▁')}｜>"
    for name in (
        *("begin of sentence", "end of sentence", "User", "Assistant", "tool calls begin", "tool calls end"),
        *("tool call begin", "tool call end", "tool sep", "tool outputs begin", "tool outputs end"),
        *("tool output begin", "tool output end"),
    )
)
GLM = ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")

RSTAR = """\
{{- '<|im_start|>system\\nYou may use tools. Reason inside <reason></reason>, answer inside <answer></answer>.\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{%- if tools %}{{- '<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '\\n</tools>' }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set written = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '\\n<tool_call>\\n' + written | tojson + '\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<reason>' }}{%- endif %}
"""
"""Of the shape of rStar2-Agent's: an opened `<reason>`, and results of a special form."""


@dataclass(frozen=True)
class Family:
    """What a model's folder says of its chat."""

    template: str  # TRL's name for it, or a template
    eos: str
    special: tuple[str, ...]
    tags: tuple[str, ...] = ()  # separate tokens, but not special
    generation_eos: tuple[str, ...] = ()


FAMILIES = {
    "qwen2.5": Family("qwen2_5", "<|im_end|>", QWEN, QWEN_TAGS[:2], ("<|im_end|>", "<|endoftext|>")),
    "qwen3-base": Family("qwen3", "<|endoftext|>", QWEN, QWEN_TAGS, ("<|endoftext|>",)),
    "qwen3": Family("qwen3", "<|im_end|>", QWEN, QWEN_TAGS, ("<|im_end|>", "<|endoftext|>")),
    "qwen3-instruct": Family("qwen3_instruct_2507", "<|im_end|>", QWEN, QWEN_TAGS, ("<|im_end|>", "<|endoftext|>")),
    "qwen3.5": Family("qwen3_5_think", "<|im_end|>", QWEN, QWEN_TAGS, ("<|im_end|>", "<|endoftext|>")),
    "qwen3.6": Family("qwen3_6", "<|im_end|>", QWEN, QWEN_TAGS, ("<|im_end|>", "<|endoftext|>")),
    "llama3": Family("llama3", "<|eot_id|>", LLAMA, (), ("<|end_of_text|>", "<|eot_id|>")),
    "llama3.1": Family("llama3_1", "<|eot_id|>", LLAMA, (), ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")),
    "r1-distill": Family("deepseek_r1_distill", DEEPSEEK[1], DEEPSEEK, ("<think>", "</think>")),
    "deepseek-v3": Family("deepseekv3", DEEPSEEK[1], DEEPSEEK, ("<think>", "</think>")),
    "glm4.5": Family("glm4moe", "<|endoftext|>", GLM, QWEN_TAGS, ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "gemma": Family("gemma", "<eos>", GEMMA),
    "rstar2": Family(RSTAR, "<|im_end|>", QWEN, QWEN_TAGS, ("<|im_end|>", "<|endoftext|>")),
    "hermes-special": Family("qwen3_instruct_2507", "<|im_end|>", (*QWEN, *QWEN_TAGS), (), ("<|im_end|>",)),
}


def template_text(name: str) -> str:
    if "{" in name or not name.strip():
        return name
    trl = find_spec("trl")  # importing it takes seconds
    assert trl is not None and trl.origin is not None
    return (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer_of(family: Family) -> Any:
    """Bytes, and the family's tokens; loads and saves as any."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens(list(family.special))
    backend.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in family.tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=next((token for token in family.special if "begin" in token or token == "<bos>"), None),
        eos_token=family.eos,
        chat_template=template_text(family.template),
        clean_up_tokenization_spaces=False,
    )


def save_family(name: str, folder: Path, *, context_tokens: int = 40_960, **generation: Any) -> Path:
    """A model's folder with all but weights."""
    family = FAMILIES[name]
    tokenizer_of(family).save_pretrained(str(folder))
    config = {"vocab_size": 400, "max_position_embeddings": context_tokens}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation_of(family) | generation))
    return folder


def generation_of(family: Family) -> dict[str, Any]:
    """Its generation_config.json."""
    tokenizer = tokenizer_of(family)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in family.generation_eos]
    return {"eos_token_id": ids} if ids else {}


def chat_with(
    tokenizer: Any, generation: dict[str, Any] | None = None, config: ChatConfig | None = None
) -> TokenizerChat:
    """Its chat, without instructions."""
    config = config or ChatConfig()
    return TokenizerChat(tokenizer, resolve(tokenizer, generation or {}, config), thinking=config.thinking)
