"""A model's chat format, where its folder does not define it or defines it wrongly."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Template, stop tokens, thinking and calls; unset values are found in the model's folder."""

    protocol: Literal["own", "rstar2-agent-14b"] = "own"
    """published prompt for training, evaluation and serving: rstar2-agent-14b sets template, system, before and
    tool-schema to those of the released code of arXiv:2508.20722 and shows the tools; options given beside it win"""
    template: str = ""
    """chat template, a jinja file; empty takes the tokenizer's own"""
    system: str = ""
    """system text before each problem; empty takes the built-in instructions, none leaves it out"""
    before: str = ""
    """words before each problem, in the same message; empty puts none there"""
    thinking: Literal["auto", "on", "off"] = "auto"
    """the template's switch for thinking; auto leaves it as it is"""
    parser: str = "auto"
    """of tool calls: hermes, qwen_xml, glm, deepseek, llama_json, mistral, or vllm:NAME for one of vLLM's; auto takes
    the one that reads what the template writes"""
    stop: tuple[str, ...] = ()
    """tokens that end a turn, besides those of template, tokenizer and generation_config.json"""
    tool_schema: str = ""
    """name, description and parameters of the Python tool as the model sees them, exactly: a JSON file of
    {"type": "function", "function": {...}}; empty takes the built-in schema"""
