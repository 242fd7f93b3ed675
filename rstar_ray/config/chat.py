"""How one talks with a model, where its folder does not say it or says it wrong."""

from dataclasses import dataclass
from typing import Literal

from rstar_ray.config.checks import require


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Template, stop tokens, thinking and calls; what is left alone is found in the model's folder."""

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
    tool_name: str = "python"
    """what the Python tool is called before this model (rStar2-Agent-14B: python_code_with_standard_io)"""

    def __post_init__(self) -> None:
        require(bool(self.tool_name), "--chat.tool-name", "it is empty", "give a name")
