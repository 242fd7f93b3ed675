"""RL stage 1 (arXiv:2508.20722 Table 2): all problems, short responses, so that the policy learns to be brief.

python recipes/stage1.py --algorithm.resample none --seed 1
"""

from recipes.sft import SFT
from rstar_ray.config import RolloutConfig, RunConfig
from rstar_ray.config.recipe import Recipe

PAPER = RunConfig(
    stage="stage1",
    steps=300,
    reset_optimizer=True,
    rollout=RolloutConfig(max_response_tokens=8_192, max_turns=10),
)
TINY = {"steps": 40, "rollout.max_response_tokens": 88, "rollout.max_turns": 3, "optimizer.learning_rate": 1.5e-4}
STAGE_1 = Recipe(paper=PAPER, tiny=TINY)

if __name__ == "__main__":
    from actors.launch.run import launch

    launch([STAGE_1], sft=SFT)
