"""Overrides of a model's chat format, for models whose folder does not define it or defines it wrongly."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Template, stop tokens, thinking and tool calls; unset values are read from the model's folder."""

    protocol: Literal["own", "rstar2-agent-14b"] = "own"
    """published prompt for training, evaluation and serving. rstar2-agent-14b sets template, system, before and
    tool-schema to those of the released code of arXiv:2508.20722 and shows the tools; explicit options override it"""
    template: str = ""
    """chat template, a Jinja file; empty uses the tokenizer's template"""
    system: str = ""
    """system message before each problem; empty uses the built-in instructions, none omits the message"""
    before: str = ""
    """text before each problem, in the same message"""
    thinking: Literal["auto", "on", "off"] = "auto"
    """the template's thinking switch; auto keeps the template's default"""
    parser: str = "auto"
    """parser of tool calls: hermes, qwen_xml, glm, deepseek, llama_json, mistral, or vllm:NAME for one of vLLM's; auto
    selects the parser that can read the calls that the template writes"""
    stop: tuple[str, ...] = ()
    """tokens that end a turn, in addition to those of template, tokenizer and generation_config.json"""
    tool_schema: str = ""
    """exact name, description and parameters of the Python tool as the model sees them: a JSON file of
    {"type": "function", "function": {...}}; empty uses the built-in schema"""
