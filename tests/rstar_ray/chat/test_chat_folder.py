"""A model's folder is looked at before anything starts, and an exported one stops where the policy was trained to."""

import json
from pathlib import Path

import pytest

from rstar_ray.chat.load_chat import load_chat, write_chat_files
from rstar_ray.config import ChatConfig
from rstar_ray.errors import ConfigError
from tests.rstar_ray.chat.families import save_family, template_text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_family("qwen3-base", tmp_path, top_p=0.9)


def test_what_is_exported_names_every_stop_token_and_the_template_it_was_trained_with(folder: Path, tmp_path: Path):
    template = tmp_path / "other.jinja"
    template.write_text(template_text("qwen3_instruct_2507"))
    chat = load_chat(folder, ChatConfig(template=str(template)), instruct=True)
    write_chat_files(folder, chat)
    generation = json.loads((folder / "generation_config.json").read_text())
    stops = [chat.tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")]
    assert generation == {"eos_token_id": stops, "top_p": 0.9}
    again = load_chat(folder, ChatConfig(), instruct=True)
    assert again.tokenizer.chat_template == template.read_text()
    assert again.profile.stop_tokens == chat.profile.stop_tokens


def test_a_system_text_takes_the_place_of_the_instructions_or_none_does(folder: Path):
    from rstar_ray.trajectory import Problem

    def prompt(config: ChatConfig) -> str:
        chat = load_chat(folder, config, instruct=True)
        return chat.decode(chat.prompt_ids(Problem(id="p", problem="q", answer="")))

    assert "Solve the problem. Think step by step; you may write Python" in prompt(ChatConfig())
    assert "<|im_start|>system\nBe kind." in prompt(ChatConfig(system="Be kind."))
    assert prompt(ChatConfig(system="none")).startswith("<|im_start|>system\n# Tools")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
            "--model: .* has no tokenizer. Hint: copy",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "--model: the tokenizer of .* cannot be read"),
        (
            lambda folder: (folder / "config.json").write_text('{"vocab_size": 100}'),
            "knows token .*, its model has 100",
        ),
        (lambda folder: (folder / "generation_config.json").write_text("["), "generation_config.json cannot be read"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [[1]]}'),
            r"generation_config.json names \[1\] as eos_token_id, which is not a token",
        ),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "x"}'),
            "generation_config.json names 'x' as eos_token_id",
        ),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [99999]}'),
            "generation_config.json names 99999 as eos_token_id",
        ),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "--chat.template: the tokenizer has no chat"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_in_one_line(folder: Path, change: object, problem: str):
    change(folder)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=problem) as refused:
        load_chat(folder, ChatConfig(), instruct=True)
    assert "\n" not in str(refused.value)


def test_a_template_that_cannot_be_read_is_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"--chat.template: nowhere.jinja cannot be read"):
        load_chat(folder, ChatConfig(template="nowhere.jinja"), instruct=True)


def test_a_placeholder_above_the_embedding_is_no_other_vocabulary_but_a_token_of_the_template_is(folder: Path):
    from rstar_ray.chat.load_chat import load_tokenizer

    tokenizer = load_tokenizer(folder)
    size = max(tokenizer.get_vocab().values()) + 1
    (folder / "config.json").write_text(f'{{"vocab_size": {size}}}')
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(str(folder))
    assert load_chat(folder, ChatConfig(), instruct=True).profile.answer_end
    tokenizer.chat_template = tokenizer.chat_template + "{# <image_soft_token> #}"
    tokenizer.save_pretrained(str(folder))
    with pytest.raises(ConfigError, match=f"knows token {size} .'<image_soft_token>'"):
        load_chat(folder, ChatConfig(), instruct=True)
