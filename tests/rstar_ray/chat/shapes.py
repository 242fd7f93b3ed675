"""Chat models of shapes that few templates have, written here: what somebody may come with.

Besides bytes there are tokenizers of sentencepiece's making, which put a space before each text they are given.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.rstar_ray.chat.families import DEEPSEEK, GEMMA, GLM, QWEN_TAGS, Family, template_text, tokenizer_of

ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system, rest = messages[0].content, messages[1:] %}
{%- else %}{% set system, rest = '', messages %}{% endif %}
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and loop.first %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (system + '\\n\\n' if system and loop.last else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- call.function | tojson }}{{- '' if loop.last else ', ' }}
{%- endfor %}{{- ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{% endif %}
{%- endfor %}"""
"""As Mistral's 7B of the third kind: no opening for the assistant, and ids that it insists on."""
MISTRAL_ARGS = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{% endif %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.role == 'assistant' %}{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}{{- eos_token }}{% endif %}
{%- endfor %}"""
"""As Mistral's later ones."""
LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set rest, system = messages[1:], messages[0].content %}"
    "{% else %}{% set rest, system = messages, '' %}{% endif %}{% for m in rest %}" + ALTERNATE + "\n"
    "{%- if m.role == 'user' %}{{ bos_token + '[INST] ' + ('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if "
    "loop.first and system else '') + m.content | trim + ' [/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
"""Its turns are words, and not tokens; `bos_token` stands before each question, and the tokenizer adds one itself."""
PHI_4 = (
    "{% for m in messages %}{% if m.role == 'system' and m.tools %}"
    "{{ '<|system|>' + m.content + '<|tool|>' + m.tools + '<|/tool|><|end|>' }}"
    "{% else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
"""Tools are a field of the system message, and a conversation that is not opened ends with another token."""
DEEPSEEK_31 = """\
{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'system' %}{{- m.content }}
{%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.tool_calls %}
{{- '<｜Assistant｜></think>' + m.content + '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m.role == 'assistant' %}
{{- ('' if messages[loop.index0 - 1].role == 'tool' else '<｜Assistant｜></think>') + m.content + eos_token }}
{%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}
{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{% endif %}"""
"""As DeepSeek's V3.1: a thought that the prompt closes without having opened it, and arguments as text."""
GLM_4 = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}<|assistant|>{{ c.function.name }}\n"
    "{{ c.function.arguments | tojson }}{% endfor %}{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A call is a name, and JSON on the next line: nothing marks it."""
KIMI = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}{% if m.tool_calls %}"
    "<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>functions.{{ c.function.name }}:0"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
NO_TOOLS_NO_SYSTEM = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('who?') }}{% endif %}"
    + ALTERNATE
    + "{{ '<|' + m.role + '|>' + m.content | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NAMES_THE_TOOL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.role == 'tool' else '' }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | "
    "tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
MARKS += ("[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[CALL_ID]", "[ARGS]")
PHI = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|end|>")
IM = ("<|im_start|>", "<|im_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_tool|>", "<|im_middle|>")
KIMIS = tuple(f"<|tool_call{part}|>" for part in ("s_section_begin", "s_section_end", "_begin", "_argument_begin"))
KIMIS += ("<|tool_call_end|>",)


@dataclass(frozen=True)
class Shape:
    """A family, and how its tokenizer treats spaces and beginnings."""

    family: Family
    spaces: str = ""  # sentencepiece: where a space is put before a text, "first" or "always"; empty: bytes
    adds_bos: bool = False  # whenever it encodes a text


BRACKETS = ("<s>", "</s>", "<unk>")
SHAPES = {
    "mistral": Shape(Family(MISTRAL, "</s>", (*BRACKETS, *MARKS)), spaces="first", adds_bos=True),
    "mistral-args": Shape(Family(MISTRAL_ARGS, "</s>", (*BRACKETS, *MARKS))),
    "llama-2": Shape(Family(LLAMA_2, "</s>", BRACKETS), spaces="always", adds_bos=True),
    "phi-4": Shape(Family(PHI_4, "<|endoftext|>", PHI)),
    "gemma-3": Shape(Family("gemma3", "<eos>", ("<unk>", *GEMMA)), "never"),
    "deepseek-3.1": Shape(Family(DEEPSEEK_31, DEEPSEEK[1], DEEPSEEK, ("<think>", "</think>")), adds_bos=True),
    "no-system-no-tools": Shape(Family(NO_TOOLS_NO_SYSTEM, "<|endoftext|>", (*BRACKETS, *PHI)), spaces="always"),
    "names-the-tool": Shape(Family(NAMES_THE_TOOL, "<|im_end|>", IM)),
    "adds-bos": Shape(Family("qwen2_5", "<|im_end|>", ("<s>", *IM), ("<tool_call>", "</tool_call>")), adds_bos=True),
    "cohere": Shape(
        Family(
            "cohere", "<eos>", ("<bos>", "<eos>", *(f"<|{name}_TOKEN|>" for name in (
                "START_OF_TURN", "END_OF_TURN", "USER", "CHATBOT", "SYSTEM"
            )))
        )
    ),
    "lfm2": Shape(Family("lfm2", "<|im_end|>", (*IM, "<|tool_response_start|>", "<|tool_response_end|>"))),
    "nemotron": Shape(Family("nemotron_3_nano", "<|im_end|>", IM, (*QWEN_TAGS[:2], *QWEN_TAGS[4:]))),
}  # fmt: skip
WITHOUT_A_PARSER = {
    "glm-4": (Shape(Family(GLM_4, "<|endoftext|>", GLM)), ""),
    "kimi": (Shape(Family(KIMI, "<|im_end|>", (*IM, *KIMIS))), "kimi_k2"),
    "lfm2-v2": (Shape(Family("lfm2_v2", "<|im_end|>", (*IM, "<|tool_call_start|>", "<|tool_call_end|>"))), "lfm2"),
    "gemma-4": (Shape(Family("gemma4", "<turn|>", ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"))), "gemma4"),
    "gpt-oss": (Shape(Family("gptoss", "<|return|>", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>",
                                                      "<|return|>", "<|call|>"))), ""),
}  # fmt: skip
"""With vLLM's parser where it has one."""


@cache
def shaped(name: str) -> Any:
    """The tokenizer of a shape."""
    shape = SHAPES[name] if name in SHAPES else WITHOUT_A_PARSER[name][0]
    tokenizer = _sentencepiece(shape) if shape.spaces else tokenizer_of(shape.family)
    if not shape.spaces and tokenizer.bos_token is None and shape.family.special[0] == "<s>":
        tokenizer.bos_token = "<s>"
    if shape.adds_bos:
        from tokenizers import processors

        bos = str(tokenizer.bos_token)
        tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.convert_tokens_to_ids(bos))]
        )
    return tokenizer


def _sentencepiece(shape: Shape) -> Any:
    """Words begin with ▁, what has no token is bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = list(dict.fromkeys(["<unk>", *shape.family.special]))
    letters = [*(chr(code) for code in range(33, 127)), "▁"]
    words = ["▁a", "▁W", "Wh", "▁Wh", "at", "▁What", "▁1", "▁i", "▁is", "▁[", "▁p", "in", "▁T"]
    vocabulary = {token: number for number, token in enumerate([*special, *(f"<0x{b:02X}>" for b in range(256))])}
    vocabulary |= {token: len(vocabulary) + number for number, token in enumerate([*letters, *words])}
    merges = [("▁", "a"), ("▁", "W"), ("W", "h"), ("▁", "Wh"), ("a", "t"), ("▁Wh", "at"), ("▁", "1"), ("▁", "i")]
    merges += [("▁i", "s"), ("▁", "["), ("▁", "p"), ("i", "n"), ("▁", "T")]
    backend: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=shape.spaces, split=False)
    strip = [] if shape.spaces == "never" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token=next((token for token in ("<bos>", "<s>") if token in special), None),
        eos_token=shape.family.eos,
        chat_template=template_text(shape.family.template),
        clean_up_tokenization_spaces=False,
    )
