"""Writes a small model, problems, conversations, a tool and a reward, to follow docs/own.md on a CPU.

python -m examples.real_shaped FOLDER

The model has Qwen3's architecture and chat template, and random weights. The problems are generated. The tokenizer is
trained on them and on Python's standard library, so that changes of this repository do not change it.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from rstar_ray.chat.instructions import instructions
from rstar_ray.tools.loader import tool_specs

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LIBRARY = Path(json.__file__).parents[1]
PRE_TOKENS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words, single digits, punctuation with the breaks behind it: as Qwen's tokenizers cut."""
OWN = '''\
from rstar_ray.reward.find import boxed_answer
from rstar_ray.tools.tool import Tool, ToolFailed

FACTS = {"prime": "A prime has two divisors.", "gcd": "The greatest common divisor of two numbers."}


async def find(word: str) -> str:
    if word not in FACTS:
        raise ToolFailed(f"nothing about {word}")
    return FACTS[word]


WORD = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
search = Tool(name="search", description="Looks a word up.", parameters=WORD, function=find)


def graded(completion, problem):
    """Right is 1; else a little for being brief, so that siblings differ."""
    return 1.0 if boxed_answer(completion) == problem.answer else 0.5 / (1 + len(completion))
'''
TOOLS = ("python", "own:search")
QUESTIONS = ((12, 34), (7, 8), (15, 6), (21, 13))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a model."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


TEN_MILLION = Shape(vocabulary=8_192, hidden=256, intermediate=768, layers=8, heads=4, kv_heads=2, head_dim=64)


def main(arguments: Sequence[str]) -> None:
    """A folder for docs/own.md: model, tool and reward, conversations, problems, an exam."""
    folder = Path(*arguments)
    folder.mkdir(parents=True)
    write_all(folder, TEN_MILLION, problems=400)
    print(f"{folder}: model/, own/own.py, conversations.jsonl, problems.jsonl, exam.jsonl")


def write_all(root: Path, shape: Shape, *, problems: int) -> None:
    """Into a folder that is there; two of the conversations are invalid."""
    said = [*islice(conversations(QUESTIONS, own_folder(root / "own"), times=12), 48)]
    write_rows(root / "conversations.jsonl", [*said, *BAD_ROWS])
    raw = raw_problems(problems, seed=1)
    write_rows(root / "problems.jsonl", [*raw, {"problem": exam(1, 0)[0]["problem"] + " Why?", "answer": "1"}])
    write_rows(root / "exam.jsonl", exam(3, 0))
    base_model(root / "model", shape, [json.dumps(one) for one in (*said[:8], *raw)])


def own_folder(folder: Path) -> Path:
    """A custom tool and reward, in own.py."""
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    return folder


# ---------------------------------------------------------------- problems


def raw_problems(count: int, seed: int) -> list[dict[str, Any]]:
    """As MATH has them: a solution beside problem and answer; some fractions, and every tenth row said twice."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        a, b, c = (rng.randint(2, 60) for _ in range(3))
        problem, answer = rng.choice(
            [
                (f"What is {a} * {b}?", f"{a * b}"),
                (f"Compute ${a} + {b} \\cdot {c}$.", f"{a + b * c}"),
                (f"Find the value of $x$ such that ${a}x = {a * b}$.", f"{b}"),
                (f"Let $f(x) = {a}x + {b}$. What is $f({c})$?", f"{a * c + b}"),
                (f"What fraction of {a * b + 1} is {a}? Give $\\frac{{m}}{{n}}$.", f"\\frac{{{a}}}{{{a * b + 1}}}"),
                (f"How many multiples of {a} are there between 1 and {a * b + a - 1}, both included?", f"{b}"),
            ]
        )
        row = {"problem": problem, "answer": answer, "level": f"Level {1 + number % 5}", "type": "Algebra"}
        rows.append({**row, "solution": f"Step by step we find $\\boxed{{{answer}}}$."})
        if number % 10 == 0:
            rows.append(dict(rows[-1]))
    return rows


def exam(count: int, seed: int) -> list[dict[str, Any]]:
    """In the shape of AIME's files: long questions with integers below 1,000."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        a, b = rng.randint(10, 30), rng.randint(2, 9)
        text = (
            f"Alice walks ${a}$ miles every day, and Bob walks $b = {b}$ times as far. Find how many miles Bob walks."
        )
        rows.append({"id": f"exam-{number}", "problem": text, "answer": str(a * b)})
    return rows


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


# ---------------------------------------------------------------- conversations


def conversations(questions: Sequence[tuple[int, int]], own: Path, *, times: int) -> Iterator[dict[str, Any]]:
    """`messages` with `tools`: a thought, a program, its result, a thought, the answer; some continue."""
    specs = tool_specs(TOOLS, str(own))
    schemas = [spec.as_schema() for spec in specs]
    for number in range(times):
        for a, b in questions:
            call = {"type": "function", "function": {"name": "python", "arguments": {"code": f"print({a} * {b})"}}}
            answer = f"<answer>\\boxed{{{a * b}}}</answer>"
            messages: list[dict[str, Any]] = [
                {"role": "system", "content": instructions(specs)},
                {"role": "user", "content": f"What is {a} * {b}?"},
                {"role": "assistant", "content": "", "reasoning_content": "I compute it.", "tool_calls": [call]},
                {"role": "tool", "content": str(a * b)},
                {"role": "assistant", "content": answer, "reasoning_content": "That is it."},
            ]
            if number % 4 == 3:
                messages += [{"role": "user", "content": "Thanks."}, {"role": "assistant", "content": "Gladly."}]
            yield {"messages": messages, "tools": schemas}


BAD_ROWS: tuple[Any, ...] = (
    {"messages": [{"role": "user", "content": "Only a question?"}]},
    {"messages": [{"role": "alien", "content": "x"}, {"role": "assistant", "content": "y"}]},
)


# ---------------------------------------------------------------- the model


def base_model(folder: Path, shape: Shape, texts: Sequence[str]) -> Path:
    """A base checkpoint of Qwen3's architecture as one downloads it: untied, bfloat16, in shards, with Qwen's files."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer(shape.vocabulary, texts)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4_096,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=f"{max(1, model.num_parameters() // 2_000_000)}MB")
    tokenizer.save_pretrained(str(folder))
    generation = {
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "max_new_tokens": 2048,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def _tokenizer(vocabulary: int, texts: Sequence[str]) -> Any:
    """Byte-level BPE with Qwen's tokens and template; some rows of the model's vocabulary are left without a token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    added = [*SPECIAL, *TAGS]
    backend: Any = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    learned: Any = trainers.BpeTrainer(
        vocab_size=vocabulary - 2 * len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*texts, *_programs()], learned)
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=_template(),
        clean_up_tokenization_spaces=False,
        model_max_length=131_072,
    )


def _template() -> str:
    """Qwen3's chat template, as TRL ships it; importing TRL would take seconds."""
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        raise SystemExit("Qwen3's chat template comes from trl, which is not installed. Hint: pip install trl")
    return (Path(trl.origin).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")


def _programs() -> Iterator[str]:
    for folder in ("json", "email", "http", "unittest", "asyncio"):
        for path in sorted((LIBRARY / folder).glob("*.py")):
            yield path.read_text(encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
