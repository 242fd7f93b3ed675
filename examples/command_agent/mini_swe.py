"""mini-swe-agent, unmodified, as a command: the policy writes bash commands, and submits its answer with one.

cd examples/command_agent && python -m venv venv-swe && venv-swe/bin/pip install mini-swe-agent && cd ../..
rstar stage 1 --model MODEL --own-folder examples/command_agent --agent.command "venv-swe/bin/python mini_swe.py" \\
    --run-dir runs/swe

The commands run as children of this process, inside its jail (docs/security.md).
"""

import json
import os

os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no network but the endpoint
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

SYSTEM = "You solve problems with bash. Call the tool bash in every message."
TASK = """{{task}}

Submit the answer with: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ANSWER"""


def main() -> None:
    problem = json.loads(os.environ["RSTAR_PROBLEM"])
    agent = DefaultAgent(
        LitellmModel(model_name="openai/policy"),
        LocalEnvironment(cwd=os.environ["HOME"], timeout=10),
        system_template=SYSTEM,
        instance_template=TASK,
        step_limit=8,
        cost_limit=0.0,
    )
    ended = agent.run(problem["problem"])
    print(json.dumps({"reward": float(ended.get("submission", "").strip() == problem["answer"])}))


if __name__ == "__main__":
    main()
