"""Published ways of evaluating, by the name that `--evaluate.protocol` takes; other options go over them."""

from typing import Any

PROTOCOLS: dict[str, dict[str, Any]] = {
    "own": {},
    "paper": {
        "evaluate.samples": 16,
        "evaluate.temperature": 0.6,
        "evaluate.top_p": 1.0,  # not published
        "evaluate.max_response_tokens": 30_720,
        "evaluate.max_turns": 30,
    },
    "release": {
        "evaluate.samples": 16,
        "evaluate.temperature": 0.0,
        "evaluate.top_p": 1.0,
        "evaluate.max_response_tokens": 30_720,
        "evaluate.max_turns": 5,
    },
}
"""own: the stage's own; paper: arXiv:2508.20722 section 5; release: what the authors' released code evaluates with."""
