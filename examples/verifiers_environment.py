"""A taskset of `verifiers` (here 0.4) through the endpoint, in its own virtual environment, as an agent of a run.

python -m venv vf && vf/bin/pip install verifiers==0.4.0 uv
vf/bin/python examples/verifiers_environment.py rows MY_TASKSET > rows.jsonl
export RSTAR_VERIFIERS=vf/bin/python
rstar stage 1 --data.train rows.jsonl --agent.run verifiers_environment:solve --own-folder examples \\
    --run-dir runs/verifiers

`verifiers` runs the task with its `null` harness and its tools; the reward of the rollout is the trace's.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the other environment has no rstar_ray
    from rstar_ray.agent.endpoint import Endpoint
    from rstar_ray.trajectory import Problem


async def solve(problem: "Problem", endpoint: "Endpoint") -> float:
    from rstar_ray.errors import ToolError

    python = Path(os.environ.get("RSTAR_VERIFIERS", "vf/bin/python")).absolute()
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # verifiers calls uv
    named = [problem.metadata["taskset"], str(problem.metadata["index"])]
    process = await asyncio.create_subprocess_exec(
        python, __file__, "run", *named, endpoint.base_url, endpoint.model,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PATH": path, "OPENAI_API_KEY": endpoint.api_key},
    )  # fmt: skip
    try:
        said = (await process.communicate())[0].decode().splitlines()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode or not said:
        raise ToolError(f"verifiers ended with status {process.returncode}")
    return float(json.loads(said[-1])["reward"])


async def run(task: Any, base_url: str, model: str) -> None:
    import verifiers.v1 as vf
    from verifiers.v1.harnesses.null import NullHarnessConfig

    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    here = {"harness": NullHarnessConfig(id="null"), "runtime": vf.SubprocessConfig()}
    trace = await vf.Agent(vf.AgentConfig(model=model, client=client, **here)).run(task)
    if any(error.type != "ProviderError" for error in trace.errors):  # that one: tokens or turns have run out
        sys.exit(str(trace.errors))
    print(json.dumps({"reward": trace.reward}))


if __name__ == "__main__":
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_taskset

    command, name, *others = sys.argv[1:]
    tasks = list(load_taskset(vf.TasksetConfig(id=name)))
    if command == "run":
        asyncio.run(run(tasks[int(others[0])], *others[1:]))
    else:
        for index, task in enumerate(tasks):
            row = {"id": f"{name}-{index}", "answer": "-", "taskset": name, "index": index}
            print(json.dumps(row | {"problem": str(task.data.prompt or name)}))
