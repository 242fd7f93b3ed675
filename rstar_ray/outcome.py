"""The outcome of a model's program, as data (GRPO-RoC counts it, arXiv:2508.20722 Eq. 4)."""

from enum import StrEnum


class Outcome(StrEnum):
    """How a tool call ended; determined from the kernel and our clock, never from the program's output."""

    OK = "ok"
    ERROR = "error"  # the program raised or exited non-zero
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    OUTPUT_LIMIT = "output_limit"  # killed for printing more than its limit
    KILLED = "killed"  # killed by a signal
    INVALID = "invalid"  # could not be parsed or run at all

    @property
    def failed(self) -> bool:
        """Whether the call counts as an error in Eq. 4: every outcome except `ok`."""
        return self is not Outcome.OK
