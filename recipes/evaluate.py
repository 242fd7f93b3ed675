"""avg@k and pass@k of a policy (arXiv:2508.20722 section 5) on held-out problems or on files of problems.

python recipes/evaluate.py --model runs/mine/checkpoints/stage1-step-000034/model --evaluate.files aime2024.jsonl
"""

from rstar_ray.config import RunConfig
from rstar_ray.config.recipe import Recipe

TINY = {"evaluate.max_response_tokens": 512, "evaluate.max_turns": 6}
EVALUATE = Recipe(paper=RunConfig(stage="evaluate"), tiny=TINY)

if __name__ == "__main__":
    from actors.launch.evaluation import launch_evaluation

    launch_evaluation(EVALUATE)
