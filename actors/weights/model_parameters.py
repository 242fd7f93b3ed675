"""Reads a Hugging Face folder, and checks its parameters against its safetensors and against published weights.

Learner and engines both use transformers' parameter names. A folder may save more than its model has: an output head
tied to the embeddings, or buffers of older releases.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from actors.weights.buckets import WeightEntry
from rstar_ray.errors import ConfigError, EngineError, one_line
from rstar_ray.experts import experts_in

Shapes = Mapping[str, tuple[int, ...]]
INDEX = "model.safetensors.index.json"
NAMED = 4
"""Most parameters that a message names; a model has hundreds."""


@lru_cache(maxsize=4)
def _empty_model(folder: Path) -> Any:
    """The causal LM that config.json describes, on the meta device; no weights are loaded."""
    import torch
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


def parameter_shapes(folder: Path) -> Shapes:
    """Shape of every parameter of the folder's model; tied parameters count once."""
    return {name: tuple(parameter.shape) for name, parameter in _empty_model(folder).named_parameters()}


def linear_layers(folder: Path) -> Mapping[str, tuple[int, int]]:
    """(outputs, inputs) of every linear layer of the folder's model except its output head."""
    from torch import nn

    model = _empty_model(folder)
    head = model.get_output_embeddings()
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


class SavedWeights:
    """The safetensors of a folder, read one tensor at a time; empty if it has none."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Path] = {name: path for path in _files(folder) for name in _names(path)}

    def shapes(self) -> Shapes:
        from safetensors import safe_open

        found: dict[str, tuple[int, ...]] = {}
        for path in dict.fromkeys(self._files.values()):
            with safe_open(path, "np") as saved:
                found |= {name: tuple(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
        return found

    def tensor(self, name: str) -> Any:
        """A torch tensor, in the dtype it was saved in."""
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as saved:
            return saved.get_tensor(name)


CHANGES_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Fields of config.json that change logits after the output layer: Gemma 2, Cohere, Granite, Falcon-H1."""
PACKED = frozenset({"full_attention", "sliding_attention"})
"""Layer types that keep packed rows separate."""


def refuse_misfit(folder: Path) -> None:
    """Raise `ConfigError` if a learner cannot train the folder's model, or if the folder's safetensors do not hold the
    parameters that its config.json describes."""
    refuse_untrainable(folder)
    saved = _whole(folder, "the safetensors", lambda: SavedWeights(folder).shapes())
    if not saved:
        raise ConfigError("--model", f"{folder} has no safetensors", "save its weights as safetensors")
    parameters = _whole(folder, "config.json", lambda: parameter_shapes(folder))
    if missing := sorted(parameters.keys() - saved.keys()):
        raise ConfigError(
            "--model",
            f"config.json of {folder} describes parameters that its safetensors do not hold: {_some(missing)}",
            "give a complete folder of a dense causal LM with transformers' parameter names",
        )
    if reshaped := [name for name in parameters if parameters[name] != saved[name]]:
        name = reshaped[0]
        raise ConfigError(
            "--model",
            f"{name} is {list(saved[name])} in the safetensors of {folder} and {list(parameters[name])} by its "
            "config.json",
            "make config.json agree with the weights (set vocab_size to the padded vocabulary)",
        )
    _refuse_another_head(folder, parameters.keys(), saved.keys())


def refuse_unpacked(folder: Path, attention: str) -> None:
    """Raise `ConfigError` if rows are packed and a layer type would pass one row's state on to the next row."""
    kinds = cast(list[str], _config(folder).get("layer_types") or [])
    if attention == "rows" and (others := sorted(set(kinds) - PACKED)):
        raise ConfigError(
            "--learner.attention",
            f"{attention} packs rows end to end, and {folder} has layers ({', '.join(others)}) that do not keep them "
            "separate",
            "give sdpa",
        )


def refuse_untrainable(folder: Path) -> None:
    """Raise `ConfigError` if config.json shows that the model cannot be trained; does not read weights."""
    config = _config(folder)
    if experts := experts_in(config):
        raise ConfigError(
            "--model",
            f"{folder} is a mixture of experts ({experts}). Expert routing is not replayed: the learner may select "
            "other experts than the engine did for the same tokens, and would train on wrong probabilities",
            "use a dense model",
        )
    if config.get("quantization_config"):
        raise ConfigError("--model", f"the weights of {folder} are quantised", "use the model before quantisation")
    for name in CHANGES_LOGITS:
        if config.get(name) not in (None, 0, 1):
            raise ConfigError(
                "--model",
                f"{folder} changes its logits after its output layer ({name} is {config[name]})",
                "use a model whose logits are hidden @ weight",
            )


def _config(folder: Path) -> dict[str, Any]:
    """config.json, with the text_config of a multimodal model merged in; empty if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        part = config.get("text_config")
        return config | part if isinstance(part, dict) else config
    except (OSError, ValueError, AttributeError):
        return {}  # loading the model reports the error


def _whole(folder: Path, part: str, read: Callable[[], Shapes]) -> Shapes:
    try:
        return read()
    except ConfigError:
        raise
    except Exception as broken:  # safetensors and transformers raise many types for incomplete or unknown models
        problem = f"{part} of {folder} cannot be read ({one_line(broken)})"
        raise ConfigError("--model", problem, "copy it again") from broken


def _refuse_another_head(folder: Path, parameters: Collection[str], saved: Collection[str]) -> None:
    """Raise `ConfigError` if config.json ties the output head to the embeddings but the saved head differs.

    Loaders would untie the two, so learner and engine would have a parameter that config.json does not describe.
    """
    head, embeddings = "lm_head.weight", "model.embed_tokens.weight"
    if head in parameters or head not in saved or embeddings not in saved:
        return
    weights = SavedWeights(folder)
    if not weights.tensor(head).equal(weights.tensor(embeddings)):
        raise ConfigError(
            "--model",
            f"config.json of {folder} ties the output head to the embeddings, its safetensors hold a head that differs",
            "set tie_word_embeddings to false in its config.json",
        )


def refuse_other_parameters(
    model: Path, entries: Iterable[WeightEntry], adapter: Shapes = MappingProxyType({})
) -> None:
    """Raise `EngineError` unless `entries` are the parameters of the folder's model, in the same shapes.

    With an adapter, its matrices are required and the model's parameters may all be absent.
    """
    given = {entry.name: entry.shape for entry in entries}
    if adapter and given == adapter:
        return
    expected = {**parameter_shapes(model), **adapter}
    if given == expected:
        return
    missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    reshaped = sorted(name for name in given.keys() & expected.keys() if given[name] != expected[name])
    raise EngineError(
        f"not the weights of {model}: missing {_some(missing)}, unknown {_some(unknown)}, "
        f"of another shape {_some(reshaped)}"
    )


def _files(folder: Path) -> list[Path]:
    """Weight files, by the index if there is one: a folder may also hold the same weights in another form."""
    index = folder / INDEX
    if index.is_file():
        shards = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise ConfigError("--model", f"{folder} lacks {_some(missing)}, which its {INDEX} names", "copy it again")
        return shards
    whole = folder / "model.safetensors"
    return [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))


def _names(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "np") as saved:
        return list(saved.keys())


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"[{', '.join(names[:NAMED])}]{more}"
