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
    """Limits of one call; see `program_limits` for those of a run, `standard_limits` for the defaults.

    A program times out after `cpu_s` of CPU time (all threads), or `wall_s` after its start; waiting in a queue counts
    for neither. So a busy machine does not time out a working program early, and a sleeping program still ends.
    """

    cpu_s: float
    wall_s: float
    memory_bytes: int  # address space beyond that of the warm interpreter, including the program's imports
    stdout_chars: int  # kept of stdout, and of the last expression's value up to 65,280; the middle is removed
    stderr_chars: int  # kept of stderr; three quarters from its end, which is more useful
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
            if not low <= value <= high:  # true for NaN too
                shown = value if value != value or abs(value) < 1 << 64 else "a huge number"
                raise ValueError(f"limits.{field}: {shown} is outside {low} to {high}")

    def above(self, ceilings: "Limits") -> str:
        """The first field that exceeds `ceilings`; empty if there is none."""
        return next((each.name for each in fields(self) if getattr(self, each.name) > getattr(ceilings, each.name)), "")


def program_limits(config: SandboxConfig) -> Limits:
    """Limits of the model's programs; defaults of the paper's released code (arXiv:2508.20722), except wall time."""
    return Limits(
        cpu_s=config.time_limit_s,
        wall_s=config.wall_s,
        memory_bytes=config.memory_mb * MIB,
        stdout_chars=config.max_output_chars,
        stderr_chars=config.max_output_chars,
        output_bytes=config.max_output_mb * MIB,
    )


def tool_limits(limits: Limits, deadline_s: float, max_chars: int) -> Limits:
    """Limits of a program that is a tool, with a separate deadline and cap."""
    wall_s = deadline_s + TOOL_ROOM_S
    return replace(limits, cpu_s=deadline_s, wall_s=wall_s, stdout_chars=max_chars, stderr_chars=max_chars)


def patience_s(limits: Limits, usual_s: float) -> float:
    """Seconds to wait for a program: `usual_s`, or more if its wall limit needs it."""
    return max(usual_s, limits.wall_s * CALL_ROOM)


def standard_limits() -> Limits:
    """The limits of a call that sets none: those of a run with default settings."""
    return program_limits(SandboxConfig())


# Highest limits that a client of the HTTP server may request, unless the server has other settings.
CEILINGS = Limits(
    cpu_s=60.0,
    wall_s=120.0,
    memory_bytes=1536 * MIB,
    stdout_chars=MIB,
    stderr_chars=MIB,
    output_bytes=64 * MIB,
)
