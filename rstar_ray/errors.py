"""Failures of the system, and errors as text. Failures of a model's program are data: see `rstar_ray.outcome`."""

MOST_CHARS = 300


def one_line(error: BaseException) -> str:
    """Type and message on one line; the type alone where there is no message.

    Of a message above `MOST_CHARS` the middle is cut out: a traceback names the cause at its end.
    """
    text = " ".join(str(error).split())
    if len(text) > MOST_CHARS:
        text = f"{text[: MOST_CHARS // 3]} ... {text[-MOST_CHARS * 2 // 3 :]}"
    return _typed(error, text)


def first_line(error: BaseException) -> str:
    """Type and first line: Ray's errors for lost actors list their ids after it."""
    return _typed(error, str(error).strip().partition("\n")[0])


def last_line(error: BaseException) -> str:
    """The last line of a remote traceback, which names the cause; the type where there is no message."""
    return str(error).strip().rpartition("\n")[2] or type(error).__name__


def _typed(error: BaseException, message: str) -> str:
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class RStarError(Exception):
    """A fault of the system; it is retried elsewhere or ends the run, and is never shown to the model."""


class ConfigError(ValueError):
    """An invalid setting, path or dataset row. The message is one line with the field and a hint for the fix."""

    def __init__(self, field: str, problem: str, hint: str) -> None:
        super().__init__(f"{field}: {problem}. Hint: {hint}")
        self.field = field
        self.problem = problem
        self.hint = hint

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, str, str]]:
        return (type(self), (self.field, self.problem, self.hint))


class SandboxError(RStarError):
    """The sandbox failed to run a program; the program is not at fault."""


class JudgeError(RStarError):
    """An answer could not be judged: the comparison or the reward function hung, crashed or returned an invalid
    value.
    """


class ToolError(RStarError):
    """A tool's host failed, or a tool raised this because a resource is unavailable; the call is not at fault."""


class ToolStateLost(ToolError):
    """The state that a tool held for a rollout is lost, without a snapshot: the rollout restarts."""


class EngineError(RStarError):
    """A generation engine died or refused a request."""


class LearnerError(RStarError):
    """A learner rank failed or reported a state it cannot train from."""


class RankLost(LearnerError):
    """A learner rank died or was killed because it was silent, met a temporary fault, or lost its training
    rows: the gang can restart from its newest checkpoint.
    """


class TransferError(RStarError):
    """A transfer of weights from the learner to an engine failed; both may be healthy."""


class VersionGone(LearnerError):
    """The learner no longer holds the weights of this version."""


class Stopped(RStarError):
    """The user or the cluster stopped the run; the same command resumes it."""


class NothingLearned(RStarError):
    """A stage ended because steps in a row had no usable update: no signal, not finite, or too far off policy."""


class DeadlineExceeded(RStarError):
    """A wait on another process exceeded its deadline.

    Attributes: the waiting process, the process that it waited for, the reason, and the seconds.
    """

    def __init__(self, waiter: str, owner: str, reason: str, seconds: float) -> None:
        super().__init__(f"{waiter} waited {seconds:g} s for {owner} ({reason}) and gave up")
        self.waiter = waiter
        self.owner = owner
        self.reason = reason
        self.seconds = seconds

    def __reduce__(self) -> tuple[type["DeadlineExceeded"], tuple[str, str, str, float]]:
        return (type(self), (self.waiter, self.owner, self.reason, self.seconds))


class SandboxFull(SandboxError):
    """The queue is full; use another executor or retry later."""


class SandboxClosed(SandboxError):
    """The pool is not started, or is closing."""


class SandboxLost(SandboxError):
    """The worker of every attempt died without an answer."""


class SandboxLate(SandboxError):
    """The call's deadline passed before it had an answer."""


class SandboxSlow(SandboxError):
    """No worker was ready in time, although the call was accepted."""


class InterpreterFailed(SandboxError):
    """The interpreter that runs the programs cannot be started, at any level of isolation."""
