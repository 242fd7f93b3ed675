"""`rstar COMMAND [OPTIONS]`: every command by one name. `rstar COMMAND --help` shows its options."""

import runpy
import sys
from collections.abc import Sequence

COMMANDS = {
    "sft": ("recipes.sft", (), "supervised fine-tuning before RL"),
    "stage 1": ("recipes.stage1", (), "RL on all problems, short responses"),
    "stage 2": ("recipes.stage2", (), "RL on all problems, longer responses"),
    "stage 3": ("recipes.stage3", (), "RL on the problems that are not solved yet"),
    "train": ("recipes.train", (), "SFT and the three stages in turn"),
    "again": ("recipes.again", (), "run one of these, and start it again after a failure"),
    "evaluate": ("recipes.evaluate", (), "measure avg@k and pass@k of a policy"),
    "prepare": ("recipes.prepare", (), "convert published problem sets to training problems"),
    "plan": ("recipes.plan", (), "compute what fits on which GPUs, and how long a step takes"),
    "preflight": ("actors.preflight", (), "check these machines before a run"),
    "rehearse": ("recipes.rehearse", (), "run three steps on random weights, and compare with the plan"),
    "watch": ("recipes.watch", (), "serve the report page of a running run"),
    "report": ("rstar_ray.report", (), "write report.html and report.md of a run"),
    "export": ("recipes.export", (), "export a checkpoint with a model card, or upload it to the Hugging Face hub"),
    "replay": ("recipes.replay", (), "repeat a recorded step's update, and compare"),
    "verify": ("rstar_ray.run_dir", ("verify",), "check that a run directory is complete and undamaged"),
    "forget": ("rstar_ray.run_dir", ("forget",), "delete one stage from a run directory"),
    "chat": ("recipes.chat", (), "chat with a policy"),
    "serve": ("recipes.serve", (), "serve a policy as OpenAI chat completions and Anthropic Messages"),
}
"""By name: the module that runs as `__main__`, its first arguments, and what it does."""


def usage() -> str:
    lines = [f"  {name:<10} {does}" for name, (_, _, does) in COMMANDS.items()]
    files = "`--config FILE` reads options from a TOML file; the command line wins over it."
    return "\n".join([__doc__ or "", "", *lines, "", files])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: the command's own; 2 where there is no such command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in COMMANDS), "")
    if not name:
        print(f"error: {words[0]}: no such command. Hint: rstar --help lists all", file=sys.stderr)
        return 2
    module, first, _ = COMMANDS[name]
    sys.argv = [f"rstar {name}", *first, *words[len(name.split()) :]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # while the command's modules are imported
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
