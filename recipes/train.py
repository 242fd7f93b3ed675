"""The whole recipe in turn: SFT, then RL in three stages, then the report. Options hold for every stage.

python recipes/train.py --scale tiny --seed 1 --run-dir runs/mine
"""

from recipes.sft import SFT
from recipes.stage1 import STAGE_1
from recipes.stage2 import STAGE_2
from recipes.stage3 import STAGE_3

if __name__ == "__main__":
    from actors.launch.run import launch

    launch([SFT, STAGE_1, STAGE_2, STAGE_3])
