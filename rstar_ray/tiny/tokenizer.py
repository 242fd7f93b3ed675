"""A generated tokenizer: words of the tiny world, single digits, and every printable ASCII character.

A pre-token in the vocabulary is one token; any other is split into characters. There are no merges, each number is a
sequence of digits, and text that the tiny world never uses still round-trips.
"""

import string
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rstar_ray.tiny.conversations import sample_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN = "<unk>"
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<answer>", "</answer>")
SPELLED = string.digits + string.ascii_letters + string.punctuation + " \n\t"
MAX_WORDS = 240

# What every call opens with and what every traceback repeats is one token, and so are indents: a tiny model has
# better uses for its time.
PRE_TOKENS = "|".join(
    (
        r'\{"name": "python", "arguments": \{"code": "',
        r'Traceback \(most recent call last\):\n  File "<tool>", line ',
        r'  File "<tool>", line ',
        r", in <module>\n",
        r"\\boxed\{",
        r" {8}| {4}",
        r" ?[A-Za-z_.]*[A-Za-z_]\(?",  # a word, a name called
        r"[0-9]",
        r"\s",
        r" ?[^A-Za-z0-9_\s]+",  # operators and brackets in a row
    )
)

CHAT_TEMPLATE = """\
{%- macro call(tool_call) -%}
{%- set f = tool_call.function if tool_call.function is defined else tool_call -%}
<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments if f.arguments is string else f.arguments | tojson }}}
</tool_call>
{%- endmacro -%}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call these functions:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nCall one as {"name": ..., "arguments": ...} inside <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- '<|im_start|>system\\n' + content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- call(tool_call) }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('unknown role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return cast(pre_tokenizers.PreTokenizer, pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated"))


def common_pieces(texts: Iterable[str], max_pieces: int) -> list[str]:
    """The most frequent pre-tokens of two or more characters, ties in alphabetical order."""
    split = _pre_tokenizer()
    counts = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text) if len(piece) > 1)
    ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
    return ranked[:max_pieces]


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """Build the tokenizer, which does not depend on the run's seed."""
    from transformers import PreTrainedTokenizerFast

    pieces = [UNKNOWN, END_OF_TEXT, TURN_START, TURN_END, *TAGS, *SPELLED, *common_pieces(sample_texts(), MAX_WORDS)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    assert len(vocabulary) == len(pieces), "a piece appears twice"
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN, ignore_merges=True))
    backend.pre_tokenizer = _pre_tokenizer()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([UNKNOWN, END_OF_TEXT, TURN_START, TURN_END])
    backend.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNKNOWN,
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def save_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """Write the tokenizer as a Hugging Face folder that `AutoTokenizer` loads."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(str(folder))
    return tokenizer
