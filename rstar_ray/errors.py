"""Our own failures. Failures of a model's program are data: see `rstar_ray.outcome`."""


class RStarError(Exception):
    """A fault of the system: retried elsewhere or ends the run; never shown to the model."""


class ConfigError(ValueError):
    """A setting, path or dataset row that the user can fix; one line that names the field and how to fix it."""

    def __init__(self, field: str, problem: str, hint: str) -> None:
        super().__init__(f"{field}: {problem}. Hint: {hint}")
        self.field = field
        self.problem = problem
        self.hint = hint

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[str, str, str]]:
        return (type(self), (self.field, self.problem, self.hint))


class SandboxError(RStarError):
    """The sandbox failed to run a program; says nothing about the program."""


class JudgeError(RStarError):
    """An answer could not be judged: the comparison or the reward function hung, crashed or returned an invalid
    value.
    """


class ToolError(RStarError):
    """A tool's host failed, or what a tool needs is gone and it raises this; says nothing about the call."""


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


class DeadlineExceeded(RStarError):
    """A wait on another process ran out of time.

    Attributes name who waited, for whom, why, and for how many seconds.
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
    """The queue has no room; try another executor or come back later."""


class SandboxClosed(SandboxError):
    """The pool is not started, or closes."""


class SandboxLost(SandboxError):
    """Every attempt lost its cell without an answer."""


class SandboxLate(SandboxError):
    """The call's deadline passed before it had an answer."""


class SandboxSlow(SandboxError):
    """Nothing was refused, and yet no cell was ready in time."""


class InterpreterFailed(SandboxError):
    """The interpreter that runs the programs cannot be started, at any level of isolation."""
