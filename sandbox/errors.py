"""What can become of the sandbox itself; none of it says anything about a program."""

from rstar_ray.errors import SandboxError


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
