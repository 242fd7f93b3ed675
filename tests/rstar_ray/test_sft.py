"""Conversations as tokens: what the assistant says has a loss, nothing else has, and borders are a rollout's."""

import json
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.chat import TokenizerChat
from rstar_ray.errors import ConfigError
from rstar_ray.sft import Conversation, conversation, encode, load_conversations, render, to_example
from rstar_ray.tiny.tokenizer import make_tokenizer
from rstar_ray.trajectory import Problem, ToolResult

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 17 + 5?"},
    {
        "role": "assistant",
        "content": "Compute.",
        "tool_calls": [{"type": "function", "function": {"name": "python", "arguments": {"code": "print(17 + 5)"}}}],
    },
    {"role": "tool", "content": "22"},
    {"role": "assistant", "content": "<answer>\\boxed{22}</answer>"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def test_the_loss_is_on_what_the_assistant_says_and_its_end_of_turn(tokenizer: Any):
    example = to_example(MESSAGES, tokenizer, 1)
    text = tokenizer.decode(example.token_ids)
    trained = tokenizer.decode(example.token_ids[example.loss_mask])
    assert text == tokenizer.apply_chat_template(MESSAGES, tokenize=False).rstrip("\n")
    assert trained == (
        'Compute.\n<tool_call>\n{"name": "python", "arguments": {"code": "print(17 + 5)"}}\n</tool_call><|im_end|>'
        "<answer>\\boxed{22}</answer><|im_end|>"
    )


def test_the_tokens_around_the_assistants_are_those_that_a_rollout_puts_there(tokenizer: Any):
    from rstar_ray.outcome import Outcome

    chat = TokenizerChat(tokenizer, instruct=False)
    example = to_example(MESSAGES, tokenizer, 1)
    prompt = chat.prompt_ids(Problem(id="p", problem="What is 17 + 5?", answer="22"))
    answer = chat.tool_answer_ids([ToolResult(outcome=Outcome.OK, text="22")])
    silent = example.token_ids[~example.loss_mask].tolist()
    assert silent == prompt + answer


def test_tools_reach_the_template(tokenizer: Any):
    tools = [{"type": "function", "function": {"name": "python", "parameters": {}}}]
    one = conversation({"messages": MESSAGES, "tools": tools}, "row")
    assert '"name": "python", "parameters"' in render(tokenizer, one)[0].text


def test_arguments_given_as_json_text_are_not_quoted_twice(tokenizer: Any):
    messages = json.loads(json.dumps(MESSAGES))
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"code": "print(17 + 5)"}'
    assert (
        to_example(messages, tokenizer, 1).token_ids.tolist() == to_example(MESSAGES, tokenizer, 1).token_ids.tolist()
    )


def test_many_conversations_are_encoded_as_one_at_a_time_and_too_long_ones_are_reported(tokenizer: Any):
    longer = [*MESSAGES, {"role": "user", "content": "And 1 + 1?"}, {"role": "assistant", "content": "2"}]
    rows = [
        Conversation(name="a:1", messages=MESSAGES),
        Conversation(name="a:2", messages=longer),
        Conversation(name="a:3", messages=MESSAGES),
    ]
    alone = to_example(MESSAGES, tokenizer, 1)
    examples, problems = encode(tokenizer, rows, max_tokens=len(alone.token_ids))
    assert [example.name for example in examples] == ["a:1", "a:3"]
    assert examples[0].token_ids.tolist() == alone.token_ids.tolist()
    assert examples[0].loss_mask.tolist() == alone.loss_mask.tolist()
    assert [str(problem).split(",")[1] for problem in problems] == [f" above the context of {len(alone.token_ids)}"]
    assert encode(tokenizer, [], max_tokens=10) == ([], [])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_files_give_the_same_conversations_whatever_their_form(tokenizer: Any, tmp_path: Path, suffix: str):
    # Parquet holds nested rows as JSON text here: structs of different shapes are filled up with nulls there.
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"messages": MESSAGES}) + "\n" for _ in range(3)))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([{"messages": MESSAGES, "tools": None}] * 3), path)
    loaded = load_conversations(path)
    assert [one.name for one in loaded] == [f"rows.{suffix}:{row}" for row in (1, 2, 3)]
    want = to_example(MESSAGES, tokenizer, 1).token_ids.tolist()
    assert all(to_example(one, tokenizer, 1).token_ids.tolist() == want for one in loaded)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([], "no `messages`"),
        ({"messages": []}, "messages is no list, or empty"),
        ({"messages": "[{"}, "messages is no JSON"),
        ({"messages": ["hi"]}, "message 1 is no object"),
        ({"messages": [{"role": "human", "content": "hi"}]}, "message 1 has the role 'human'"),
        ({"messages": [{"role": "user"}]}, r"message 1 \(user\) has no text"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": ""}]}, "neither `content` nor `tool_calls`"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "arguments that are no JSON",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "a tool without a name"),
    ],
)
def test_a_row_that_is_no_conversation_is_named_with_what_is_wrong(tmp_path: Path, row: Any, problem: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=f"rows.jsonl:2: .*{problem}"):
        load_conversations(path)


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", "{"), ("rows.parquet", "no"), ("empty.jsonl", "")])
def test_a_broken_or_empty_file_is_refused(tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        load_conversations(tmp_path / name)
    with pytest.raises(ConfigError, match="no file"):
        load_conversations(tmp_path / "nowhere.jsonl")


class Template:
    """A tokenizer with a chat template gone wrong."""

    eos_token = "<end>"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def apply_chat_template(self, messages: list[Any], *, add_generation_prompt: bool, **_: Any) -> str:
        if self.fault == "raises":
            raise KeyError("content")
        ending = "" if self.fault == "no end" else "<end>"
        parts = [f"[{message['role']}]{message['content']}{ending}" for message in messages]
        if self.fault == "rewrites" and len(messages) > 2:
            parts[1] = "[assistant]forgotten<end>"
        return "".join(parts) + ("[assistant]" if add_generation_prompt else "")


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("raises", "refuses message 1"),
        ("no end", "ends message 2 without '<end>'"),
        ("rewrites", "changes earlier text when message 4 comes"),
    ],
)
def test_what_a_chat_template_does_wrong_is_reported_by_row(fault: str, problem: str):
    messages = [{"role": role, "content": f"{i}"} for i, role in enumerate(["user", "assistant"] * 2)]
    with pytest.raises(ConfigError, match=f"row 7: .*{problem}"):
        to_example(messages, Template(fault), 7)
    _, (found,) = encode(Template(fault), [Conversation(name="f:7", messages=messages)], max_tokens=9)
    assert found.name == "f:7"


def test_a_conversation_without_an_assistant_has_nothing_to_train_on(tokenizer: Any):
    with pytest.raises(ConfigError, match="row 2: no assistant message"):
        to_example(MESSAGES[:1], tokenizer, 2)
