"""What is used of vLLM beyond its documented interface; `test_engine` uses all of it."""

import inspect

import pytest

from actors.generation import vllm_private
from actors.generation.vllm_private import VERSION, attribute, refuse_without_prefix_salts
from rstar_ray.errors import EngineError


class Engine:
    core = "here"


@pytest.mark.parametrize(
    ("owner", "path", "named"),
    [
        (Engine(), "core.resources", "Engine.core.resources"),
        ("json", "gone", "json.gone"),
        ("json.no_such_module", "gone", "json.no_such_module.gone"),
    ],
)
def test_what_another_version_of_vllm_does_not_have_is_named_with_the_version_that_had_it(
    owner: object, path: str, named: str
):
    assert attribute(Engine(), "core") == "here"
    with pytest.raises(EngineError, match=rf"has no {named}, which is used as of vLLM {VERSION}\. Hint: install vLLM"):
        attribute(owner, path)


@pytest.mark.long
def test_vllms_sleep_mode_has_the_parts_and_the_levels_that_a_swap_uses():
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import SLEEP_TAGS

    assert set(SLEEP_TAGS) == {"weights", "kv_cache"}  # all of them awake: it decodes again
    assert {"level", "mode"} <= inspect.signature(AsyncLLM.sleep).parameters.keys()
    assert "tags" in inspect.signature(AsyncLLM.wake_up).parameters


def test_an_engine_whose_prompts_take_no_salt_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    def without(owner: object, path: str) -> dict[str, object]:
        return {"prompt_token_ids": list[int]}

    monkeypatch.setattr(vllm_private, "attribute", without)
    with pytest.raises(EngineError, match=r"--staleness: vLLM .* has no cache_salt.*got 2.*Hint: .*--staleness 0"):
        refuse_without_prefix_salts(2)
