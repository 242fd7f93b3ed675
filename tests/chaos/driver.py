"""The command that the harness starts, with `tests.chaos.seams` installed: stage 1, or an evaluation (`evaluate`)."""

import sys

if __name__ == "__main__":
    from tests.chaos import seams

    seams.in_driver()
    from actors.launch.evaluation import launch_evaluation
    from actors.launch.run import launch
    from recipes.evaluate import EVALUATE
    from recipes.stage1 import STAGE_1

    if sys.argv[1] == "evaluate":
        launch_evaluation(EVALUATE, sys.argv[2:])
    else:
        launch([STAGE_1])
