"""ExecutionRequest and ExecutionResult as plain data, for the native route and for files."""

from dataclasses import asdict, fields, replace
from typing import Any, cast

from rstar_ray.outcome import Outcome
from sandbox.limits import Limits, standard_limits
from sandbox.request import ExecutionRequest, ExecutionResult

_LIMITS = {entry.name for entry in fields(Limits)}
_REQUEST = {entry.name for entry in fields(ExecutionRequest)} - {"limits", "trusted"}
_RESULT = {entry.name for entry in fields(ExecutionResult)}
_COUNT: tuple[type, ...] = (int,)
_KINDS: dict[str, tuple[type, ...]] = {  # types of a result's fields; all others are counts
    **dict.fromkeys(("outcome", "stdout", "stderr", "value", "reason", "call_id"), (str,)),
    **dict.fromkeys(("exit_status", "signal"), (int, type(None))),
    **dict.fromkeys(("wall_s", "cpu_s"), (int, float)),
}
_MOST = 1 << 63


def request_to_data(request: ExecutionRequest) -> dict[str, Any]:
    """A request as plain data; `trusted` is not sent: a remote program is never trusted."""
    data = asdict(request)
    del data["trusted"]
    return data


def request_from_data(data: object, limits: Limits | None = None) -> ExecutionRequest:
    """Read a request; `limits` are the defaults. Raises ValueError, naming the field, for an invalid one."""
    if not isinstance(data, dict):
        raise ValueError(f"a request is an object, not {type(data).__name__}")
    given = cast(dict[str, Any], data)
    unknown = [str(name)[:40] for name in given if name not in _REQUEST and name != "limits"]
    if unknown:
        raise ValueError(f"unknown fields: {', '.join(unknown[:5])}")
    if "code" not in given:
        raise ValueError("code: missing")
    values = {name: value for name, value in given.items() if name != "limits"}
    if values.get("stdin", "") is None:
        del values["stdin"]
    seed = values.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"seed: expected a whole number, got {type(seed).__name__}")
    return ExecutionRequest(**values, limits=_limits(given.get("limits"), limits or standard_limits()))


def _limits(data: object, default: Limits) -> Limits:
    if data is None:
        return default
    if not isinstance(data, dict):
        raise ValueError(f"limits: expected an object, got {type(data).__name__}")
    given = cast(dict[str, Any], data)
    unknown = [str(name)[:40] for name in given if name not in _LIMITS]
    if unknown:
        raise ValueError(f"limits: unknown fields {', '.join(unknown[:5])}")
    return replace(default, **given)


def result_to_data(result: ExecutionResult) -> dict[str, Any]:
    """Plain data of a result."""
    data = asdict(result)
    data["outcome"] = str(result.outcome)
    return data


def result_from_data(data: object) -> ExecutionResult:
    """Read a result, with a type check of each field. Raises ValueError, naming the field."""
    if not isinstance(data, dict) or set(cast(dict[str, Any], data)) - _RESULT:
        raise ValueError("not an execution result")
    given = cast(dict[str, Any], data)
    for name, value in given.items():
        wrong = type(value) not in _KINDS.get(name, _COUNT)
        if wrong or (isinstance(value, (int, float)) and not -_MOST < value < _MOST):  # NaN is refused too
            raise ValueError(f"{name}: not what an execution result has there")
    values: dict[str, Any] = {**given, "outcome": Outcome(given.get("outcome", ""))}
    return ExecutionResult(**values)
