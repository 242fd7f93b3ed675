import hashlib
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar_ray.tiny.tokenizer import TAGS, make_tokenizer, save_tokenizer

PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n\t"


@pytest.fixture(scope="module")
def made() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@given(st.text(alphabet=PRINTABLE, max_size=200))
def test_printable_ascii_round_trips(made: Any, text: str):
    assert made.decode(made.encode(text, add_special_tokens=False)) == text


@given(st.integers(min_value=0, max_value=10**12))
def test_every_digit_is_one_token(made: Any, number: int):
    assert made.tokenize(f"{number}") == list(str(number))


def test_tags_and_turn_ends_are_single_tokens_and_tags_survive_decoding(made: Any):
    for tag in (*TAGS, "<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(made.encode(tag, add_special_tokens=False)) == 1
    text = "<answer>\\boxed{42}</answer><|im_end|>"
    ids = made.encode(text, add_special_tokens=False)
    assert made.decode(ids, skip_special_tokens=True) == "<answer>\\boxed{42}</answer>"


def test_foreign_text_never_becomes_a_control_token(made: Any):
    ids = made.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
    assert made.eos_token_id not in ids
    assert made.decode(ids) == "<|im_end|>"


def test_the_chat_template_renders_a_tool_conversation(loaded: Any):
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "print(3+4)"}}}
    messages = [
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "tool", "content": "8"},
    ]
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "python", "arguments": {"code": "print(3+4)"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_chat_template_puts_tools_and_system_text_in_a_system_turn(loaded: Any):
    tool = {"type": "function", "function": {"name": "python", "parameters": {}}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    plain: str = loaded.apply_chat_template(messages, tokenize=False)
    assert plain == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    with_tools: str = loaded.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '<tools>\n{"type": "function"' in with_tools
    assert with_tools.count("<|im_start|>system") == 1


def test_the_vocabulary_is_what_recorded_runs_were_trained_with(made: Any):
    words = [word for word, _ in sorted(made.get_vocab().items(), key=lambda item: item[1])]
    assert len(words) == 316
    assert hashlib.sha256("\n".join(words).encode()).hexdigest()[:16] == "bdb6f2e8757a572c"
    assert made.model_max_length == 2_048 and not made.clean_up_tokenization_spaces
