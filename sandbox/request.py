"""A request to the sandbox, and its result."""

from dataclasses import dataclass, field
from typing import Literal

from rstar_ray.outcome import Outcome
from sandbox.limits import MIB, Limits, standard_limits

MAX_CODE_CHARS = MIB  # a longer source is `invalid`, because its syntax tree would exceed the memory
MAX_STDIN_CHARS = 64 * MIB
MAX_ID_CHARS = 1_000

Language = Literal["python", "cpp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRequest:
    """One program to run. Any string is accepted as code; code that cannot run gives an outcome.

    Raises ValueError, naming the field, for values of a wrong type or beyond all bounds.
    """

    code: str
    stdin: str | bytes = ""
    limits: Limits = field(default_factory=standard_limits)
    call_id: str = ""  # chosen by the caller; returned in the result
    language: Language = "python"
    seed: int | None = None  # None: the program's generators are seeded by the kernel
    trusted: bool = False  # our code (answer checking): runs in a warm server with our libraries

    def __post_init__(self) -> None:
        if not isinstance(self.code, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"code: expected a string, got {type(self.code).__name__}")
        if not isinstance(self.stdin, (str, bytes)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"stdin: expected a string, got {type(self.stdin).__name__}")
        if len(self.stdin) > MAX_STDIN_CHARS:
            raise ValueError(f"stdin: {len(self.stdin)} characters, more than {MAX_STDIN_CHARS}")
        if not isinstance(self.limits, Limits):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"limits: expected Limits, got {type(self.limits).__name__}")
        if not isinstance(self.call_id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"call_id: expected a string, got {type(self.call_id).__name__}")
        if len(self.call_id) > MAX_ID_CHARS:
            raise ValueError(f"call_id: {len(self.call_id)} characters, more than {MAX_ID_CHARS}")
        if self.language not in ("python", "cpp"):
            raise ValueError("language: it is not 'python' or 'cpp'")
        if self.seed is not None and not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed: it is outside 0 to {(1 << 32) - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionResult:
    """How one program ended, according to the kernel and our clock.

    Texts hold at most the limit's characters plus a mark that says how many are missing; bytes
    that are not UTF-8 became U+FFFD.
    """

    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    value: str = ""  # the last expression as IPython shows it, if nothing was printed
    exit_status: int | None = None  # None if a signal ended the program
    signal: int | None = None
    reason: str = ""  # the exceeded limit, in words; empty if there is none
    wall_s: float = 0.0  # from fork to the end, without waiting in a queue
    cpu_s: float = 0.0  # user and system time of the program and its children
    peak_memory_bytes: int = 0  # resident, including the warm interpreter's pages
    stdout_cut_chars: int = 0
    stderr_cut_chars: int = 0
    value_cut_chars: int = 0
    call_id: str = ""
