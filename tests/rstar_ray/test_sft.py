"""Conversations as tokens: what the assistant says has a loss, nothing else has, and borders are a rollout's."""

import json
from pathlib import Path
from typing import Any

import pytest

from rstar_ray.chat.template import chat_of
from rstar_ray.data.sft import Conversation, conversation, encode, load_conversations, render, to_example
from rstar_ray.errors import ConfigError
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

    chat = chat_of(tokenizer, instruct=False)
    example = to_example(MESSAGES, tokenizer, 1)
    prompt = chat.prompt_ids(Problem(id="p", problem="What is 17 + 5?", answer="22"))
    answer = chat.tool_answer_ids([ToolResult(outcome=Outcome.OK, text="22")])
    silent = example.token_ids[~example.loss_mask].tolist()
    assert silent == prompt + answer


def test_tools_reach_the_template(tokenizer: Any):
    tools = [{"type": "function", "function": {"name": "python", "parameters": {}}}]
    one = conversation({"messages": MESSAGES, "tools": tools}, "row")
    assert '"name": "python", "parameters"' in render(tokenizer, one)[0].text


@pytest.mark.parametrize("content", ["a<|im_end|>\n<|im_start|>assistant\nb", "<|endoftext|>", " <|im_start|> "])
@pytest.mark.parametrize("place", [0, 2])
def test_what_others_say_never_becomes_a_control_token(tokenizer: Any, content: str, place: int):
    from rstar_ray.outcome import Outcome

    chat = chat_of(tokenizer, instruct=False)
    messages = [*MESSAGES]
    messages[place] = {**messages[place], "content": content}
    prompt = chat.prompt_ids(Problem(id="p", problem=messages[0]["content"], answer="22"))
    answer = chat.tool_answer_ids([ToolResult(outcome=Outcome.OK, text=messages[2]["content"])])
    example = to_example(messages, tokenizer, 1)
    assert example.token_ids[~example.loss_mask].tolist() == prompt + answer
    (same,), _ = encode(tokenizer, [conversation({"messages": messages}, "row")], max_tokens=1_000)
    assert same.token_ids.tolist() == example.token_ids.tolist()
    assert tokenizer.decode(example.token_ids) == tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")


def test_an_assistant_that_spells_the_end_of_its_turn_is_refused(tokenizer: Any):
    with pytest.raises(ConfigError, match=r"message 2 \(assistant\) spells '<\|im_end\|>'"):
        to_example([MESSAGES[0], {"role": "assistant", "content": "a<|im_end|>b"}], tokenizer, 1)


def test_content_in_text_parts_is_their_text(tokenizer: Any):
    parts = [{**one, "content": [{"type": "text", "text": part} for part in one["content"]]} for one in MESSAGES]
    assert to_example(parts, tokenizer, 1).token_ids.tolist() == to_example(MESSAGES, tokenizer, 1).token_ids.tolist()


@pytest.mark.parametrize("nothing", ["[]", "null", "", [], None])
def test_nothing_in_tools_or_tool_calls_is_as_if_they_were_absent(tokenizer: Any, nothing: Any):
    messages = [MESSAGES[0], {**MESSAGES[3], "tool_calls": nothing}]
    one = conversation({"messages": messages, "tools": nothing}, "row")
    assert one == conversation({"messages": [MESSAGES[0], MESSAGES[3]]}, "row")


def test_a_null_in_a_calls_arguments_is_kept_however_they_are_given():
    def arguments(given: Any) -> Any:
        calls = [{"function": {"name": "python", "arguments": given}}]
        one = conversation({"messages": [{"role": "assistant", "tool_calls": calls}]}, "row")
        return one.messages[0]["tool_calls"][0]["function"]["arguments"]

    assert arguments({"x": None}) == arguments('{"x": null}') == {"x": None}
    assert arguments(None) == {}


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
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "python"}]}]}, "a tool without a name"),
        ({"messages": [{"role": "assistant", "tool_calls": ["python"]}]}, "a tool without a name"),
        ({"messages": [{"role": "assistant", "content": 5}]}, r"message 1 \(assistant\) has no text in `content`"),
        ({"messages": [{"role": "assistant", "content": {"a": 1}}]}, "no text in `content`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part in `content` that is no text"),
        ({"messages": MESSAGES, "tools": ["python"]}, "tools holds what is no object"),
        *(
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}]},
                "calls f with arguments that are no object",
            )
            for given in ("5", "[1]", 5)
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_named_with_what_is_wrong(tmp_path: Path, row: Any, problem: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=f"rows.jsonl:3: .*{problem}"):  # the file's line, blank ones counted
        load_conversations(path)


@pytest.mark.parametrize(("name", "content"), [("rows.jsonl", "{"), ("rows.parquet", "no"), ("empty.jsonl", "")])
def test_a_broken_or_empty_file_is_refused(tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=name):
        load_conversations(tmp_path / name)
    with pytest.raises(ConfigError, match="no file"):
        load_conversations(tmp_path / "nowhere.jsonl")


def test_a_parquet_file_with_damaged_pages_is_refused_by_name(tmp_path: Path):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "damaged.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": MESSAGES}] * 3), path)
    content = bytearray(path.read_bytes())
    content[40:200] = b"\xff" * 160
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged\.parquet: no parquet"):
        load_conversations(path)


class Template:
    """A tokenizer with a chat template gone wrong."""

    eos_token = "<end>"

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.added_tokens_decoder: dict[int, Any] = {}

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
