"""Checks that an environment can import a run's packages, and that its torch is built for the environment's target.

python -m actors.preflight.imports cuda

`make setup` and preflight run it. Prints one line and exits with 1 if a check fails.
"""

import sys

BUILDS = {"cpu": "cpu", "cuda": "cuda", "rocm": "hip"}
"""Prefix of `torch_build()`, by target of `make setup`."""


def torch_build() -> str:
    """Platform that torch is built for: `cpu`, `cuda 13.0`, `hip 7.2`."""
    import torch

    if torch.version.hip is not None:
        return f"hip {torch.version.hip}"
    return "cpu" if torch.version.cuda is None else f"cuda {torch.version.cuda}"


def problem(target: str) -> str:
    """The problem with this environment in one line; empty if there is none."""
    try:
        build = torch_build()
        if not build.startswith(BUILDS[target]):
            return f"torch is built for {build}, and this environment is for {target}"
        import deepspeed  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import vllm

        if target != "rocm":  # vLLM's modules for ROCm may need a GPU, and an image is built without one
            vllm.LLM  # noqa: B018  # vLLM imports its modules lazily
    except Exception as failed:
        return f"import fails: {type(failed).__name__}: {' '.join(str(failed).split())[:200]}"
    return ""


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in BUILDS:
        print("usage: python -m actors.preflight.imports cpu|cuda|rocm", file=sys.stderr)
        return 2
    if found := problem(sys.argv[1]):
        print(f"error: {found}. Hint: make clean, then make setup TARGET={sys.argv[1]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
