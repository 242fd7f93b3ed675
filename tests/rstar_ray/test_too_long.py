"""Prompts beyond the context are found before anything starts, and hardly one is tokenized for that."""

from dataclasses import asdict
from pathlib import Path

import pytest

from rstar_ray.config import RunConfig, with_values
from rstar_ray.evaluation.evaluator import run_evaluation
from rstar_ray.run_dir.folder import RunDir
from rstar_ray.trajectory import Problem
from tests.fakes import SkilledPolicy, adding_problems, fake_context, in_run


@pytest.mark.usefixtures("without_fsync")
async def test_an_evaluation_says_how_many_it_could_not_ask(tmp_path: Path, logged: list[str]):
    values = {"evaluate.samples": 2, "evaluate.max_response_tokens": 400, "rollout.max_response_tokens": 400}
    config = with_values(RunConfig(), {**values, "engine.max_context_tokens": 900})
    problems = [*adding_problems(3), Problem(id="long", problem="1" * 1_000, answer="1")]
    with RunDir.open(tmp_path, "stage1", asdict(config)) as run_dir:
        context = fake_context(SkilledPolicy())
        (result,) = await run_evaluation(config, {"exam": problems}, in_run(context, run_dir), step=1)
        assert logged[-2] == (
            "stage1 exam: 1 of 4 prompts do not fit into a context of 900 tokens (--engine.max-context-tokens); they "
            "count as wrong"
        )
        assert result.num_problems == 4
        await run_evaluation(config, {"short": problems[:3]}, in_run(context, run_dir), step=1)
    assert sum("do not fit" in line for line in logged) == 1
