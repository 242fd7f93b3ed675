"""Published evaluation protocols, by their name in `--evaluate.protocol`; explicit options override them."""

from typing import Any

from rstar_ray.config.rollout import EvaluationConfig

_SETTINGS = ("samples", "temperature", "top_p", "max_response_tokens", "max_turns")
PAPER: dict[str, Any] = {f"evaluate.{name}": getattr(EvaluationConfig(), name) for name in _SETTINGS}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "own": {},
    "paper": PAPER,
    "release": {**PAPER, "evaluate.temperature": 0.0, "evaluate.max_turns": 5},
    "rstar2-agent-14b": {
        **PAPER,
        "chat.protocol": "rstar2-agent-14b",
        "reward.place": "answer",
    },
}
"""own: the stage's settings; paper: arXiv:2508.20722 section 5; release: the settings of the authors' released code;
rstar2-agent-14b: the paper's, with the prompt and the tool of the released rStar2-Agent-14B (`--chat.protocol`)."""
