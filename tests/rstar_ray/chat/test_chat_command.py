"""`python -m rstar_ray.chat MODEL`: what there is to know of a model's chat, and what to do where it does not fit."""

from pathlib import Path

import pytest

from rstar_ray.chat import hub
from rstar_ray.chat.__main__ import main
from rstar_ray.errors import ConfigError
from tests.rstar_ray.chat.families import save_family

TURN = "<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n"
OPENS = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
EACH = "{% for m in messages %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            EACH + "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURN + OPENS,
            ["system text       before the first question", "tools             described in the system text"],
        ),
        (
            EACH + "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TURN + OPENS,
            ["results           in a message of the user", "calls             hermes, written by rstar_ray"],
        ),
        (
            EACH + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
            "" + TURN + OPENS,
            ["system text       before the first question", "results           in a message of the user"],
        ),
        (
            "{{ strftime_now('%f') }}" + EACH + TURN + OPENS,
            ["note: SFT excludes such conversations: the chat template changes earlier text"],
        ),
    ],
)
def test_a_template_that_lacks_something_is_reported(
    template: str, said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = save_family("qwen3-instruct", tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    assert main([str(folder)]) == 0
    printed = capsys.readouterr().out
    assert [line for line in said if line not in printed] == []


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        (
            EACH + "<|im_start|>{{ m.role }}\\n{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\\n" + OPENS,
            "error: --chat.template: it accepts message content only as a list of parts. "
            "Hint: give one that takes text\n",
        ),
        (
            EACH + "{% if m.role == 'user' %}{{ m.content }}{% endif %}" + TURN + OPENS,
            "error: --chat.template: it writes the user's message more than once. Hint: give another\n",
        ),
        (
            EACH + "{% for c in m.tool_calls or [] %}DO\\n{{ c.function.name }} {{ c.function.arguments.code }} END"
            "{% endfor %}" + TURN + OPENS,
            "error: --chat.parser: no parser reads the calls that this template writes ('",
        ),
    ],
)
def test_a_template_that_nothing_can_be_done_with_is_refused_in_one_line(
    template: str, refused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = save_family("qwen3-instruct", tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(refused) and error.count("\n") == 1


def test_a_hubs_id_without_a_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(model: str, *, local_files_only: bool = False, **_: object) -> str:
        raise LocalEntryNotFoundError("not here") if local_files_only else ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    problem = "--model: Qwen/Qwen3-0.6B is not a folder, it was not fetched before, and the hub cannot be reached"
    with pytest.raises(ConfigError, match=problem):
        hub.local_folder("Qwen/Qwen3-0.6B")


def test_a_model_that_was_fetched_before_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def here(model: str, *, local_files_only: bool = False, **_: object) -> str:
        assert local_files_only
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", here)
    (tmp_path / "model.safetensors").touch()
    assert hub.local_folder("Qwen/Qwen3-0.6B") == tmp_path
    assert hub.local_folder(str(tmp_path)) == tmp_path
