"""A dense decoder's sizes, and quantities that depend only on them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rstar_ray.experts import experts_in

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder's sizes, as in a Hugging Face `config.json`."""

    name: str
    parameters: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def weights_gb(self) -> float:
        return self.parameters * 2 / GB

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of every layer in bf16."""
        return self.layers * self.kv_heads * self.head_dim * 2 * 2

    def kv_heads_of_gpu(self, tensor_parallel: int) -> int:
        """KV heads on each GPU of a replica. vLLM copies them where there are more GPUs than heads."""
        return max(1, self.kv_heads // tensor_parallel)

    def kv_bytes_of_gpu(self, tensor_parallel: int) -> int:
        """`kv_bytes_per_token` on each GPU of a replica."""
        return self.kv_bytes_per_token // self.kv_heads * self.kv_heads_of_gpu(tensor_parallel)

    def splits(self, tensor_parallel: int) -> bool:
        """Whether vLLM can split the model over this many GPUs."""
        return heads_split(self.heads, self.kv_heads, tensor_parallel)

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """Parameters of each matrix of a layer, in the order of the model's files."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = (self.hidden * query, self.hidden * key, self.hidden * key, query * self.hidden)
        return (*attention, *(3 * (self.hidden * self.intermediate,)))

    @property
    def matmul_parameters(self) -> float:
        """Parameters that a token is multiplied with: the layers' and the head's, not those of the embedding table."""
        return float(self.layers * sum(self.layer_parameters) + self.vocabulary * self.hidden)

    def elementwise_bytes(self, *, fused: bool) -> float:
        """Bytes read and written per token in a forward pass outside matrix products and attention, in all layers.

        Unfused, as transformers computes in bf16: RMSNorm casts to float32 and back in six kernels (36 bytes an
        element), rotary embedding rotates, multiplies and adds (24), SwiGLU is two kernels (10), a residual one (6).
        Fused, each is one kernel that reads its inputs and writes its output.
        """
        queries = (self.heads + self.kv_heads) * self.head_dim
        normed = 2 * self.hidden + queries  # Qwen3 norms queries and keys too
        norm, rotary, swiglu = (4, 4, 6) if fused else (36, 24, 10)
        return float(
            self.layers * (norm * normed + rotary * queries + swiglu * self.intermediate + 2 * 6 * self.hidden)
        )


def heads_split(heads: int, kv_heads: int, tensor_parallel: int) -> bool:
    """Whether vLLM can split attention over this many GPUs: each has equally many heads, and whole KV heads."""
    more, fewer = max(kv_heads, tensor_parallel), min(kv_heads, tensor_parallel)
    return heads % tensor_parallel == 0 and more % fewer == 0


QWEN3_14B = ModelShape(
    name="Qwen3-14B",
    parameters=14.8e9,
    layers=40,
    hidden=5_120,
    intermediate=17_408,
    heads=40,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
)


def read_model(path: Path) -> ModelShape:
    """Read a dense model's `config.json`; null counts as absent. Raises `ValueError` with file and field."""
    try:
        content: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path}: no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: no JSON object")
    row = cast(dict[str, Any], content)
    if experts := experts_in(row):
        raise ValueError(f"{path}: {experts}, a mixture of experts; only dense models are planned")

    def number(name: str, default: int | None = None) -> int:
        value = default if row.get(name) is None else row[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{path}: {name!r} is {value!r}, not a whole number of at least 1")
        return value

    hidden, layers, heads = number("hidden_size"), number("num_hidden_layers"), number("num_attention_heads")
    kv_heads, vocabulary = number("num_key_value_heads", heads), number("vocab_size")
    head_dim, intermediate = number("head_dim", hidden // heads), number("intermediate_size")
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    tied = row.get("tie_word_embeddings")
    if tied is None:
        tied = _tied_by_default(str(row.get("model_type", "")))
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return ModelShape(
        name=str(row.get("_name_or_path") or path.parent.name),
        parameters=float(layers * (attention + 3 * hidden * intermediate) + embeddings),
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
    )


def _tied_by_default(model_type: str) -> bool:
    """transformers' default of `tie_word_embeddings`, which saved configurations leave out; False for other types."""
    if not model_type:
        return False
    from transformers import CONFIG_MAPPING  # importing it takes a second

    return model_type in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[model_type](), "tie_word_embeddings", False))
