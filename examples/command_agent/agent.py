"""An agent that is a program: it knows nothing of the run but its environment.

rstar stage 1 --own-folder examples/command_agent --agent.command "venv/bin/python agent.py" --run-dir runs/command

OpenAI's client finds its address and key in OPENAI_BASE_URL and OPENAI_API_KEY. The policy's programs run as children
of this process, inside its jail (docs/security.md).
"""

import json
import os
import subprocess
import sys

from openai import OpenAI

MAX_TURNS = 4
PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a program and returns what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


def run(code: str) -> dict[str, object]:
    """What the program prints; `rstar_failed` tells Resample-on-Correct of a failure."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=10)
    except subprocess.TimeoutExpired:
        return {"content": "timed out", "rstar_failed": True}
    return {"content": (done.stdout + done.stderr)[-2_000:], "rstar_failed": done.returncode != 0}


def main() -> None:
    problem = json.loads(os.environ["RSTAR_PROBLEM"])
    client = OpenAI()
    messages = [{"role": "user", "content": problem["problem"]}]
    for _ in range(MAX_TURNS):
        said = client.chat.completions.create(model="policy", messages=messages, tools=[PYTHON]).choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            code = str(json.loads(call.function.arguments).get("code", ""))
            messages.append({"role": "tool", "tool_call_id": call.id, **run(code)})
    print(json.dumps({"reward": float(problem["answer"] in (said.content or ""))}))


if __name__ == "__main__":
    main()
