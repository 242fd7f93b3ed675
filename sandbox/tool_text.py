"""What the model reads after a call (arXiv:2508.20722, section 3.1)."""

from rstar_ray.outcome import Outcome
from sandbox.request import ExecutionResult


def tool_text(result: ExecutionResult) -> str:
    """Render a result: what was printed, else the last expression's value; errors with their traceback."""
    parts = [text for text in (result.stdout or result.value, _trouble(result)) if text]
    return "\n".join(part.strip("\n") for part in parts)


def _trouble(result: ExecutionResult) -> str:
    if result.outcome is Outcome.OK:
        return ""
    note = _NOTES.get(result.outcome, "")
    if result.outcome is Outcome.KILLED:
        note = f"The program was {result.reason or 'ended by a signal'}."
    elif result.outcome is Outcome.ERROR and not result.stderr:
        note = f"The program exited with status {result.exit_status}."
    return "\n".join(text for text in (result.stderr.strip("\n"), note) if text)


_NOTES = {
    Outcome.TIMEOUT: "Execution timed out.",
    Outcome.OUT_OF_MEMORY: "Out of memory.",
    Outcome.OUTPUT_LIMIT: "The program printed too much and was ended.",
    Outcome.INVALID: "The program could not be run.",
}
