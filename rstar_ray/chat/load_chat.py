"""The chat format of a model folder: checked before anything starts, and written where a policy is exported.

torch and vLLM are not imported: only the tokenizer and small JSON files are read.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from rstar_ray.chat.call_syntax import CallSyntax
from rstar_ray.chat.chat_profile import ChatProfile
from rstar_ray.chat.instructions import system_text
from rstar_ray.chat.protocol import python_tool, with_protocol
from rstar_ray.chat.resolve import VLLM_PARSERS, for_tools, resolve
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import ChatConfig
from rstar_ray.errors import ConfigError, one_line
from rstar_ray.run_dir.durable import write_json, write_text
from rstar_ray.tools.spec import PYTHON_TOOL, ToolSpec

GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")


class SyntaxOf(Protocol):
    """Creates a call syntax that rstar_ray does not have, by its name, for a tokenizer and its tools."""

    def __call__(self, name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> CallSyntax: ...


def load_chat(
    folder: Path,
    config: ChatConfig,
    *,
    instruct: bool,
    tools: Sequence[ToolSpec] = (PYTHON_TOOL,),
    syntax_of: SyntaxOf | None = None,
) -> TokenizerChat:
    """The chat format of the model in `folder`; raises `ConfigError` in one line, with the fix, for what does
    not fit.

    `instruct` puts the tools' schemas and the answer format before the problem. `syntax_of` makes a parser of
    vLLM's; without it such calls are not parsed, which is enough to write prompts.
    """
    tokenizer = load_tokenizer(folder)
    found = _generation(tokenizer, folder)
    chat = configured_chat(tokenizer, config, generation=found, instruct=instruct, tools=tools, syntax_of=syntax_of)
    _refuse_other_vocabulary(chat, folder)
    return chat


def configured_chat(
    tokenizer: Any,
    config: ChatConfig,
    *,
    generation: Mapping[str, Any],
    instruct: bool,
    tools: Sequence[ToolSpec] = (PYTHON_TOOL,),
    syntax_of: SyntaxOf | None = None,
) -> TokenizerChat:
    """Like `load_chat`, for a loaded tokenizer; `generation` is the content of generation_config.json."""
    tools = [python_tool(config) if tool.runs == "python" else tool for tool in tools]
    config = with_protocol(config)
    if config.template:
        tokenizer.chat_template = _template(config.template)
    found = resolve(tokenizer, generation, config)
    shows_tools = instruct or config.protocol != "own"
    if tools and shows_tools and config.parser == "auto":
        _refuse_unwritten_calls(tokenizer, found)
    profile = for_tools(found, [tool.name for tool in tools])
    syntax = None
    if syntax_of is not None and profile.syntax.startswith("vllm:"):
        schemas = [tool.as_schema() for tool in tools]
        syntax = syntax_of(profile.syntax.removeprefix("vllm:"), tokenizer, schemas)
    return TokenizerChat(
        tokenizer,
        profile,
        system=system_text(config, tools, instruct=instruct),
        before=config.before,
        shows_tools=shows_tools,
        tools=tools,
        thinking=config.thinking,
        syntax=syntax,
    )


def _refuse_unwritten_calls(tokenizer: Any, profile: ChatProfile) -> None:
    """Refuse a template that shows tools but does not write calls, if a token of the tokenizer begins calls."""
    added = tokenizer.get_added_vocab()
    known = next((name for begins, name in VLLM_PARSERS.items() if begins.rstrip("[") in added), "")
    if known and profile.template.shows_tools and not profile.template.writes_calls:
        raise ConfigError(
            "--chat.parser",
            "the template shows tools but does not write calls, and the tokenizer has a token that begins them",
            f"vLLM has a parser: vllm:{known}. With hermes, the prompt shows the model another format",
        )


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; raises `ConfigError` if it is missing or cannot be read."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError("--model", f"{folder} has no tokenizer", "copy the model's tokenizer files there")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises many types for an incomplete folder
        raise ConfigError(
            "--model", f"the tokenizer of {folder} cannot be read ({one_line(error)})", "copy it again"
        ) from error


def write_chat_files(folder: Path, chat: TokenizerChat) -> tuple[Path, ...]:
    """Write stop tokens and template into the folder of an exported policy, so that others serve it as it was
    trained.

    Returns the written files.
    """
    generation = _json(folder / GENERATION)
    write_json(folder / GENERATION, {**generation, "eos_token_id": list(chat.profile.stop_token_ids)})
    write_text(folder / TEMPLATE, str(chat.tokenizer.chat_template))
    return folder / GENERATION, folder / TEMPLATE


def _refuse_other_vocabulary(chat: TokenizerChat, folder: Path) -> None:
    """Refuse a token without a row in the model's embedding, because its first use would end the run.

    A control token that is neither in the template nor a stop token is never used: Gemma 3 1B's tokenizer has the image
    placeholder of the larger models.
    """
    config = _json(folder / "config.json")
    part = config.get("text_config")
    size = (cast(dict[str, Any], part) if isinstance(part, dict) and part else config).get("vocab_size")
    tokenizer = chat.tokenizer
    used = f"{tokenizer.chat_template}{tokenizer.bos_token}{dict(chat.profile.stop_tokens)}"
    unused = {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special and str(token) not in used
    }
    largest = max(number for number in cast(dict[str, int], tokenizer.get_vocab()).values() if number not in unused)
    if isinstance(size, int) and largest >= size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ConfigError(
            "--model",
            f"the tokenizer of {folder} knows token {largest} ({token!r}), its model has {size}",
            "use the tokenizer that belongs to the weights",
        )


def _generation(tokenizer: Any, folder: Path) -> dict[str, Any]:
    """generation_config.json, whose `eos_token_id` is one token of the tokenizer, several, or none."""
    generation = _json(folder / GENERATION)
    named = generation.get("eos_token_id")
    for token_id in cast(list[Any], named if isinstance(named, list) else [] if named is None else [named]):
        if not isinstance(token_id, int) or tokenizer.convert_ids_to_tokens(token_id) is None:
            raise ConfigError(
                "--model",
                f"{folder / GENERATION} names {token_id!r} as eos_token_id, which is not a token of the tokenizer",
                "give the number of one, or a list of such, or copy the file that belongs to the tokenizer",
            )
    return generation


def _template(path: str) -> str:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{path} cannot be read ({one_line(error)})"
        raise ConfigError("--chat.template", problem, "name a jinja file") from error
    if not text.strip():
        raise ConfigError("--chat.template", f"{path} is empty", "name a jinja file")
    return text


def _json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError("--model", f"{path} cannot be read ({one_line(error)})", "copy it again") from error
    if not isinstance(value, dict):
        raise ConfigError("--model", f"{path} holds no object", "copy it again")
    return cast(dict[str, Any], value)
