"""The command that the harness starts: stage 1 with `tests.chaos.seams`."""

if __name__ == "__main__":
    from tests.chaos import seams

    seams.in_driver()
    from actors.launch.run import launch
    from recipes.stage1 import STAGE_1

    launch([STAGE_1])
