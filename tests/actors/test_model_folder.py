"""What a model folder must hold before a learner starts on it, and what an engine is given of it: no vLLM here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from actors.weights.buckets import WeightEntry
from actors.weights.model_parameters import (
    INDEX,
    SavedWeights,
    parameter_shapes,
    refuse_misfit,
    refuse_other_parameters,
    refuse_unpacked,
)
from rstar_ray.errors import ConfigError, EngineError
from tests.actors.policies import save_policy
from tests.actors.unpacked import NamedArray, pack

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Change = Callable[[dict[str, Any]], dict[str, Any]]


def saved_with(folder: Path, change: Change, **shape: Any) -> Path:
    """A policy's folder whose file was changed."""
    save_policy(folder, num_hidden_layers=1, **shape)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_config(folder: Path, fields: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))


def entries(folder: Path, change: Change = dict) -> list[WeightEntry]:
    arrays = {name: np.zeros(shape, np.float32) for name, shape in parameter_shapes(folder).items()}
    parameters = (NamedArray(name, array) for name, array in change(arrays).items())
    return [entry for bucket in pack(parameters, 2**20) for entry in bucket.entries]


def test_a_tied_head_counts_once_whether_or_not_the_file_has_it_beside_the_embeddings(tmp_path: Path):
    for name, change in (("once", dict), ("twice", lambda saved: saved | {HEAD: saved[EMBEDDING].copy()})):
        folder = saved_with(tmp_path / name, change)
        refuse_misfit(folder)
        assert (HEAD in SavedWeights(folder).shapes()) == (name == "twice")
        assert HEAD not in parameter_shapes(folder)
        refuse_other_parameters(folder, entries(folder))


def test_a_head_that_differs_from_the_embeddings_it_is_said_to_be_tied_to_is_refused(tmp_path: Path):
    folder = saved_with(tmp_path, lambda saved: saved | {HEAD: saved[EMBEDDING] + 1})
    with pytest.raises(ConfigError, match=r"holds? a head that differs.*tie_word_embeddings to false"):
        refuse_misfit(folder)


def test_what_the_file_lacks_is_refused_before_it_is_drawn_at_random(tmp_path: Path):
    folder = saved_with(tmp_path / "head", lambda saved: {n: a for n, a in saved.items() if n != HEAD},
                        tie_word_embeddings=False)  # fmt: skip
    with pytest.raises(ConfigError, match=r"--model: .*do not hold: \[lm_head\.weight\]. Hint: give a complete folder"):
        refuse_misfit(folder)
    folder = saved_with(tmp_path / "other", lambda saved: {f"transformer.{n}": a for n, a in saved.items()})
    with pytest.raises(ConfigError, match=r"\[model\.embed_tokens\.weight, .*\] and \d+ more"):
        refuse_misfit(folder)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"--model: the weights of .* are quantised. Hint: use the model",
        ),
        ({"final_logit_softcapping": 30.0}, r"--model: .* \(final_logit_softcapping is 30\.0\). Hint: use a model"),
        ({"num_experts": 128, "num_experts_per_tok": 8}, r"--model: .* mixture of experts \(num_experts is 128\)"),
        (
            {"text_config": {"num_local_experts": 8}},
            r"--model: .* experts \(num_local_experts is 8\).*. Hint: use a dense",
        ),
        ({"text_config": {"logit_scale": 0.0625}}, r"--model: .* \(logit_scale is 0\.0625\). Hint: use a model"),
    ],
)
def test_what_a_learner_cannot_train_is_refused_from_its_config(fields: dict[str, Any], said: str, tmp_path: Path):
    write_config(save_policy(tmp_path, num_hidden_layers=1), fields)
    with pytest.raises(ConfigError, match=said):
        refuse_misfit(tmp_path)


def test_rows_are_not_packed_through_layers_that_carry_a_state(tmp_path: Path):
    write_config(tmp_path, {"layer_types": ["full_attention", "sliding_attention"]})
    refuse_unpacked(tmp_path, "rows")
    write_config(tmp_path, {"layer_types": ["conv", "full_attention"]})
    refuse_unpacked(tmp_path, "sdpa")
    with pytest.raises(
        ConfigError, match=r"--learner\.attention: rows packs rows .* layers \(conv\) .*. Hint: give sdpa"
    ):
        refuse_unpacked(tmp_path, "rows")


def test_a_vocabulary_padded_in_the_file_alone_is_refused_with_both_shapes(tmp_path: Path):
    folder = saved_with(tmp_path, lambda saved: saved | {EMBEDDING: np.zeros((256, 128), np.float32)})
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight is \[256, 128\] in .* and \[200, 128\] by its config"):
        refuse_misfit(folder)


def test_a_folder_without_safetensors_or_without_one_of_its_shards_is_refused(tmp_path: Path):
    folder = save_policy(tmp_path, num_hidden_layers=1)
    whole = folder / "model.safetensors"
    whole.rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks \[model-00002-of-00002\.safetensors\]"):
        refuse_misfit(folder)
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no safetensors"):
        refuse_misfit(folder)


def test_the_index_says_which_files_count(tmp_path: Path):
    """Some folders hold the same weights twice, under other names."""
    folder = save_policy(tmp_path, num_hidden_layers=1)
    names = list(load_file(folder / "model.safetensors"))
    save_file({"tok_embeddings.weight": np.zeros(3)}, folder / "consolidated.safetensors")
    assert sorted(SavedWeights(folder).shapes()) == sorted(names)
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "shard.safetensors")}))
    assert sorted(SavedWeights(folder).shapes()) == sorted(names)
    refuse_misfit(folder)


def test_other_parameters_than_the_models_are_named_and_refused(tmp_path: Path):
    folder = save_policy(tmp_path, num_hidden_layers=1)
    norm = "model.norm.weight"

    def changed(arrays: dict[str, Any]) -> dict[str, Any]:
        others = {name: array for name, array in arrays.items() if name != EMBEDDING}
        return others | {norm: np.zeros(7), "extra": np.zeros(1)}

    with pytest.raises(
        EngineError, match=r"missing \[model\.embed_tokens\.weight\], unknown \[extra\], .*\[model\.nor"
    ):
        refuse_other_parameters(folder, entries(folder, changed))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", "the safetensors of .* cannot be read"),
        ("model.safetensors", b"\x08" * 400, "the safetensors of .* cannot be read"),
        (INDEX, b"{", "the safetensors of .* cannot be read"),
        (INDEX, b"{}", "the safetensors of .* cannot be read"),
        ("config.json", b'{"model_type": "nonsense"}', "config.json of .* cannot be read .*nonsense"),
    ],
)
def test_a_file_that_is_cut_off_or_unknown_is_refused_in_one_line(
    tmp_path: Path, name: str, content: bytes, message: str
):
    folder = saved_with(tmp_path / "model", dict)
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"--model: {message}") as refused:
        refuse_misfit(folder)
    assert "\n" not in str(refused.value)
