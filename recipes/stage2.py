"""RL stage 2 (arXiv:2508.20722 Table 2): the same problems with a longer budget, once about 10 % are truncated.

python recipes/stage2.py --run-dir runs/mine --balancer.rule worst_case
"""

from recipes.sft import SFT
from rstar_ray.config import AlgorithmConfig, RolloutConfig, RunConfig
from rstar_ray.config.recipe import Recipe

PAPER = RunConfig(
    stage="stage2",
    steps=85,
    algorithm=AlgorithmConfig(least_failures=2),  # the paper's floor is 0: docs/algorithm.md has the reason
    rollout=RolloutConfig(max_response_tokens=12_288, max_turns=10),
)
TINY = {"steps": 30, "rollout.max_response_tokens": 256, "rollout.max_turns": 3, "optimizer.learning_rate": 2e-4}
STAGE_2 = Recipe(paper=PAPER, tiny=TINY)

if __name__ == "__main__":
    from actors.launch.run import launch

    launch([STAGE_2], sft=SFT)
