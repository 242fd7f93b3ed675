"""Limits of one program."""

from dataclasses import dataclass, fields, replace

from rstar_ray.config import SandboxConfig
from rstar_ray.config.machines import (
    CALL_ROOM,
    LEAST_PROGRAM_S,
    MOST_OUTPUT_CHARS,
    MOST_OUTPUT_MB,
    MOST_PROGRAM_MB,
    MOST_PROGRAM_S,
    TOOL_ROOM_S,
)

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one call; `program_limits` makes those of a run, `standard_limits` what holds where none are named.

    A program times out once it has used `cpu_s` of CPU time (all threads), or when
    `wall_s` have passed on the clock since it started; waiting in a queue counts for neither.
    So on a busy machine a working program is judged by its work, while a sleeping one still ends.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int  # address space on top of the warm interpreter, with what the program still imports
    stdout_chars: int  # kept of stdout (and of the last expression's value); the middle goes
    stderr_chars: int  # kept of stderr; the end is worth more and keeps three quarters
    output_bytes: int  # more than this on either stream ends the program

    def __post_init__(self) -> None:
        for field, low, high in (
            ("cpu_s", LEAST_PROGRAM_S, MOST_PROGRAM_S),
            ("wall_s", LEAST_PROGRAM_S, MOST_PROGRAM_S),
            ("memory_bytes", MIB, MOST_PROGRAM_MB * MIB),
            ("stdout_chars", 0, MOST_OUTPUT_CHARS),
            ("stderr_chars", 0, MOST_OUTPUT_CHARS),
            ("output_bytes", 1024, MOST_OUTPUT_MB * MIB),
        ):
            value = getattr(self, field)
            whole = not field.endswith("_s")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ValueError(f"limits.{field}: expected a number, got {type(value).__name__}")
            if not low <= value <= high:  # as NaN is, too
                shown = value if value != value or abs(value) < 1 << 64 else "a huge number"
                raise ValueError(f"limits.{field}: {shown} is outside {low} to {high}")

    def above(self, ceilings: "Limits") -> str:
        """The first field that exceeds `ceilings`; empty without one."""
        return next((each.name for each in fields(self) if getattr(self, each.name) > getattr(ceilings, each.name)), "")


def program_limits(config: SandboxConfig) -> Limits:
    """Of the model's programs; by default those of the paper's released code (arXiv:2508.20722), but for the clock."""
    return Limits(
        cpu_s=config.time_limit_s,
        wall_s=config.wall_s,
        memory_bytes=config.memory_mb * MIB,
        stdout_chars=config.max_output_chars,
        stderr_chars=config.max_output_chars,
        output_bytes=config.max_output_mb * MIB,
    )


def tool_limits(limits: Limits, deadline_s: float, max_chars: int) -> Limits:
    """Of a program that is a tool, with a separate deadline and cap."""
    wall_s = deadline_s + TOOL_ROOM_S
    return replace(limits, cpu_s=deadline_s, wall_s=wall_s, stdout_chars=max_chars, stderr_chars=max_chars)


def patience_s(limits: Limits, usual_s: float) -> float:
    """How long to wait for a program where so long is usual: one that may take more ends by its own limit."""
    return max(usual_s, limits.wall_s * CALL_ROOM)


def standard_limits() -> Limits:
    """The limits of a call that sets none: those of a run with default settings."""
    return program_limits(SandboxConfig())


# What a client of the HTTP face may ask for at most, unless the server's owner says otherwise.
CEILINGS = Limits(
    cpu_s=60.0,
    wall_s=120.0,
    memory_bytes=1536 * MIB,
    stdout_chars=MIB,
    stderr_chars=MIB,
    output_bytes=64 * MIB,
)
