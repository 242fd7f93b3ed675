"""The second argument of a user's agent: where it reaches the policy."""

from dataclasses import dataclass

MODEL = "policy"
"""The model's name at the endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The policy as an OpenAI-compatible server, for one rollout."""

    base_url: str  # such as http://127.0.0.1:PORT/v1
    api_key: str  # names the rollout: requests with another key are refused
    model: str = MODEL
    rollout_id: str
    seed: int  # for the agent's own random choices: the same in a repeated run
