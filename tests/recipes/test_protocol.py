"""The protocol of rStar2-Agent-14B: one prompt and one tool in training, evaluation and talks; judged as released."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.launch.checks import Start
from actors.launch.command_line import parse
from actors.talk.talk_tools import specs_of
from actors.talk.talker import chat_in
from recipes.evaluate import EVALUATE
from recipes.stage1 import STAGE_1
from rstar_ray.agent.rollout import RolloutState, run_rollout, score
from rstar_ray.chat.load_chat import load_chat
from rstar_ray.chat.template import TokenizerChat
from rstar_ray.config import ChatConfig, RewardConfig, ToolsConfig
from rstar_ray.config.recipe import Recipe
from rstar_ray.errors import ConfigError
from rstar_ray.reward.judge import make_judge
from rstar_ray.trajectory import Completion, Problem, ToolCall
from tests.fakes import LIMITS, AddingSandbox, request
from tests.rstar_ray.chat.families import save_family
from tests.rstar_ray.test_rollout import no_comparison, prints_3

PROMPT = """\
<|im_start|>system
A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant first \
thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning process is \
enclosed within <reason> </reason> and answer is enclosed within <answer> </answer> tags, respectively, i.e., <reason> \
reasoning process here </reason> <answer> answer here </answer>.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "python_code_with_standard_io", "description": "Execute Python code with \
standard input and capture standard output. This function takes a Python code string and an input string, provides the \
input string through standard input (stdin) to the code, and captures and returns any output produced through standard \
output (stdout). If the executed code raises an exception, the error message will be captured and returned instead.", \
"parameters": {"type": "object", "properties": {"code": {"type": "string", "description": "A string containing Python \
code to be executed. The code can read from standard input using the input() function."}, "input": {"type": "string", \
"description": "A string that will be provided as standard input to the code when it calls input()."}}, "required": \
["code", "input"]}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final answer \
will be extracted automatically by the \\boxed{} tag.
This is the problem:
1+2?<|im_end|>
<|im_start|>assistant
<reason>"""
"""As the chat template and the tool of the release (microsoft/rStar) render it."""
QUESTION = Problem(id="p", problem="1+2?", answer="3")
PROTOCOL = ChatConfig(protocol="rstar2-agent-14b")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_family("qwen3-base", tmp_path / "model")


def prompt(chat: TokenizerChat) -> str:
    return chat.decode(chat.prompt_ids(QUESTION))


def chat_of_run(recipe: Recipe, model: Path, *options: str) -> TokenizerChat:
    (config,) = parse([recipe], ["--scale", "gpu", "--model", str(model), *options])
    return load_chat(model, config.chat, instruct=config.rollout.instruct, tools=Start(asked=[config]).tools)


def test_training_evaluation_and_talks_show_the_released_prompt_and_tool(model: Path):
    options = ["--chat.protocol", "rstar2-agent-14b"]
    assert prompt(chat_of_run(STAGE_1, model, *options)) == PROMPT
    assert prompt(chat_of_run(STAGE_1, model, *options, "--rollout.no-instruct")) == PROMPT
    assert prompt(chat_of_run(EVALUATE, model, *options)) == PROMPT
    assert prompt(chat_of_run(EVALUATE, model, "--evaluate.protocol", "rstar2-agent-14b")) == PROMPT
    talk = chat_in(model, PROTOCOL, specs_of(ToolsConfig(), "", PROTOCOL))
    assert talk.decode(talk.conversation_ids([{"role": "user", "content": QUESTION.problem}])) == PROMPT


SCHEMA: dict[str, Any] = {
    "function": {
        "parameters": {"properties": {"code": {"type": "string"}}, "type": "object"},
        "name": "run",
        "description": "Runs it.",
        "return": {"type": "string"},
    },
    "type": "function",
}


def test_a_tool_schema_is_shown_to_the_letter_and_its_calls_are_programs(model: Path, tmp_path: Path):
    file = tmp_path / "tool.json"
    file.write_text(json.dumps(SCHEMA, indent=1))
    chat = chat_of_run(STAGE_1, model, "--chat.tool-schema", str(file))
    assert json.dumps(SCHEMA) in prompt(chat)
    text = '<tool_call>{"name": "run", "arguments": {"code": "1"}}</tool_call>'
    assert chat.read(chat.encoder.encode(text), after_tools=False).calls == (ToolCall(code="1", tool="run"),)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "has no valid function.name"),
        (json.dumps(SCHEMA["function"]), "has no valid function.name"),
        (json.dumps({"function": {**SCHEMA["function"], "parameters": {}}}), "has no valid function.parameters"),
        (json.dumps(SCHEMA).replace('"code"', '"program"'), "has no string parameter 'code'"),
    ],
)
def test_an_invalid_tool_schema_is_refused_in_one_line(model: Path, tmp_path: Path, written: str | None, problem: str):
    file = tmp_path / "tool.json"
    if written is not None:
        file.write_text(written)
    with pytest.raises(ConfigError, match=f"--chat.tool-schema: .*{problem}") as refused:
        load_chat(model, ChatConfig(tool_schema=str(file)), instruct=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("I add. <answer>\\boxed{3}</answer>", 1.0),  # the thought is never closed
        ("I add.</reason> <answer>\\boxed{3}</answer>", 1.0),
        ("<answer>\\boxed{3}</answer></reason> I do not know.", 0.0),
    ],
)
async def test_an_answer_in_a_thought_that_is_never_closed_counts_unless_it_is_truncated(
    model: Path, said: str, reward: float, ended: bool
):
    chat = load_chat(model, PROTOCOL, instruct=True)
    ids = chat.encoder.encode(f"{said}<|im_end|>" if ended else said)

    async def generate(prompt_ids: Sequence[int], **asked: Any) -> Completion:
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), policy_versions=[0] * len(ids), ended=ended)

    wanted = request(QUESTION, limits=replace(LIMITS, max_context_tokens=10_000))
    begun = RolloutState.start(wanted, chat.prompt_ids(QUESTION))
    state = await run_rollout(begun, generate=generate, execute=AddingSandbox(), chat=chat)
    judged = await score(state, make_judge(RewardConfig(), no_comparison, prints_3))
    assert judged.summary.reward == (reward if ended else 0.0)
