"""Non-reasoning SFT before RL (arXiv:2508.20722 section 4.1): format, tool calls, instructions; not the maths.

python recipes/sft.py --run-dir runs/mine --sft.steps 100
"""

from rstar_ray.config import CheckpointConfig, RunConfig, SftConfig
from rstar_ray.config.recipe import Recipe

PAPER = RunConfig(
    stage="sft",
    sft=SftConfig(steps=5_200),
    checkpoint=CheckpointConfig(every_steps=200),  # steps are short; one in ten would write 108 TB in a 14B run
)
TINY = {"checkpoint.every_steps": 100}
SFT = Recipe(paper=PAPER, tiny=TINY)

if __name__ == "__main__":
    from actors.launch.run import launch

    launch([SFT])
