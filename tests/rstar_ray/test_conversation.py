"""Conversations of strangers' files: `messages`, ShareGPT and Glaive come out alike, and what is wrong is said."""

import json
from typing import Any

import pytest

from rstar_ray.data.conversation import RowError, conversation

QUESTION = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
WANTED = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sum": 2}'},
    {"role": "assistant", "content": "It is 2."},
]


def test_messages_sharegpt_and_glaive_say_the_same():
    messages = conversation({"messages": WANTED, "tools": [TOOL]}, "a")
    sharegpt = conversation(
        {
            "system": "Be kind.",
            "tools": json.dumps([TOOL]),
            "conversations": [
                {"from": "human", "value": "add"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": '{"sum": 2}'},
                {"from": "gpt", "value": "It is 2."},
            ],
        },
        "a",
    )
    glaive = conversation(
        {
            "system": "SYSTEM: Be kind with access to the following functions. Use them if required -\n"
            + json.dumps(TOOL),
            "chat": 'USER: add\n\n\nASSISTANT: <functioncall> {"name": "add", "arguments": \'{"a": 1}\'} '
            '<|endoftext|>\n\n\nFUNCTION RESPONSE: {"sum": 2}\n\n\nASSISTANT: It is 2. <|endoftext|>\n',
        },
        "a",
    )
    assert messages == sharegpt == glaive
    assert messages.messages == WANTED
    assert messages.tools == [{"type": "function", "function": TOOL}]


def test_glaive_without_functions_is_a_talk_and_quotes_in_its_arguments_are_read():
    talk = conversation({"system": "SYSTEM: You are kind.", "chat": "USER: hi\n\n\nASSISTANT: hello"}, "a")
    assert [message["content"] for message in talk.messages] == ["You are kind.", "hi", "hello"]
    assert talk.tools is None
    called = """USER: x\n\n\nASSISTANT: Well. <functioncall> {"name": "f", "arguments": '{"q": "it\\'s"}'}"""
    message = conversation({"system": "", "chat": called}, "a").messages[1]
    assert message["content"] == "Well."
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"q": "it's"}}


def test_other_names_for_roles_calls_and_thoughts_are_known():
    one = conversation(
        {
            "messages": [
                {"role": "developer", "content": "s"},
                QUESTION,
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "1"},
                {"role": "assistant", "content": "ok", "reasoning": "hm"},
            ]
        },
        "a",
    )
    assert [message["role"] for message in one.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert one.messages[2]["tool_calls"][0]["function"]["name"] == "f"
    assert one.messages[4]["reasoning_content"] == "hm"


def test_a_weight_is_kept_of_turns_in_either_form():
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "weight": 0}
    said = {"from": "gpt", "value": "x", "weight": 1}
    messages = conversation({"conversations": [{"from": "human", "value": "?"}, call, said]}, "row").messages
    assert [message.get("weight") for message in messages] == [None, 0, 1]


def test_the_system_column_of_messages_is_their_first_unless_they_have_one():
    said = [QUESTION, {"role": "assistant", "content": "x"}]
    one = conversation({"messages": said, "system": "be nice"}, "row")
    assert one.messages[0] == {"role": "system", "content": "be nice"}
    assert conversation({"messages": [*one.messages], "system": "other"}, "row") == one
    assert len(conversation({"messages": said, "system": " "}, "row").messages) == 2


@pytest.mark.parametrize("nothing", ["[]", "null", "", [], None])
def test_nothing_in_tools_or_tool_calls_is_as_if_they_were_absent(nothing: Any):
    said = {"role": "assistant", "content": "x"}
    one = conversation({"messages": [QUESTION, {**said, "tool_calls": nothing}], "tools": nothing}, "row")
    assert one == conversation({"messages": [QUESTION, said]}, "row")


def test_a_null_in_a_calls_arguments_is_kept_however_they_are_given():
    def arguments(given: Any) -> Any:
        calls = [{"function": {"name": "python", "arguments": given}}]
        one = conversation({"messages": [{"role": "assistant", "tool_calls": calls}]}, "row")
        return one.messages[0]["tool_calls"][0]["function"]["arguments"]

    assert arguments({"x": None}) == arguments('{"x": null}') == {"x": None}
    assert arguments(None) == {}


def calling(call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([], "no object"),
        ({"text": "x"}, "no `messages`, `conversations` or `chat`"),
        ({"messages": []}, "messages is not a list, or empty"),
        ({"messages": "[{"}, "messages is not JSON"),
        ({"messages": ["hi"]}, "message 1 is not an object"),
        ({"messages": [{"role": "human", "content": "hi"}]}, "message 1 has the role 'human'"),
        ({"messages": [{"role": "user"}]}, r"message 1 \(user\) has no text"),
        ({"messages": [QUESTION, {"role": "assistant", "content": ""}]}, "neither `content` nor `tool_calls`"),
        (calling({"function": {"name": "f", "arguments": "{"}}), "arguments that are not JSON"),
        (calling({"function": {}}), "a tool without a name"),
        (calling({"function": "python"}), "a tool without a name"),
        (calling("python"), "a tool without a name"),
        *(
            (calling({"name": "f", "arguments": given}), "arguments that are not an object")
            for given in ("5", "[1]", 5)
        ),
        ({"messages": [{"role": "assistant", "content": 5}]}, r"message 1 \(assistant\) has no text in `content`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part in `content` that is not text"),
        ({"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}, r"\(assistant\) has the weight 0.5"),
        ({"messages": [QUESTION], "tools": ["python"]}, "tools holds what is not an object"),
        ({"conversations": [{"from": "nobody", "value": "x"}]}, "message 1 is from 'nobody', who is unknown"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "calls with text that is not JSON"),
        ({"conversations": [{"from": "human", "value": 5}]}, r"message 1 \(user\) has no text"),
        ({"chat": "hello"}, "chat does not begin with USER"),
        ({"chat": 5}, "chat is not text"),
        ({"chat": "USER: a\n\n\nASSISTANT: <functioncall> f()"}, "a <functioncall> cannot be read"),
        ({"chat": "USER: a", "system": "SYSTEM: x - {oops"}, "the functions in system are not JSON"),
    ],
)
def test_a_row_that_is_not_a_conversation_says_why(row: Any, problem: str):
    with pytest.raises(RowError, match=problem):
        conversation(row, "row")
