"""RL stage 3 (arXiv:2508.20722 Table 2): only what the latest policy does not solve in 8 of 8 rollouts, more turns.

python recipes/stage3.py --run-dir runs/mine --checkpoint.every-steps 5
"""

from recipes.sft import SFT
from rstar_ray.config import AlgorithmConfig, RolloutConfig, RunConfig
from rstar_ray.config.recipe import Recipe

PAPER = RunConfig(
    stage="stage3",
    steps=125,
    drop_solved=True,
    reset_optimizer=True,
    algorithm=AlgorithmConfig(least_failures=2),  # the paper's floor is 0: docs/algorithm.md has the reason
    rollout=RolloutConfig(max_response_tokens=12_288, max_turns=15),
)
TINY = {
    "steps": 25,
    "rollout.max_response_tokens": 256,
    "rollout.max_turns": 8,
    "data.num_filtered": 400,
    "optimizer.learning_rate": 1.5e-4,
}
STAGE_3 = Recipe(paper=PAPER, tiny=TINY)

if __name__ == "__main__":
    from actors.launch.run import launch

    launch([STAGE_3], sft=SFT)
