"""Planning SFT against rendering and encoding alone: tokens per second of one core, alternating.

python -m benchmarks.sft problems.jsonl --template qwen3.jinja

The conversations are made of the file's problems: a thought, a call, its result, an answer, in one of three a second
question; the tokenizer, of 8,000 entries, of the same texts. Prints one JSON line.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rstar_ray.chat.template import chat_of
from rstar_ray.data.conversation import conversation
from rstar_ray.data.sft import encode

CONVERSATIONS = 400
CHUNK = 128
ROUNDS = 5
TOOL = {"type": "function", "function": {"name": "python", "parameters": {"type": "object", "properties": {}}}}


def rows(texts: list[str]) -> list[dict[str, Any]]:
    rng = random.Random(0)
    made: list[dict[str, Any]] = []
    for number in range(CONVERSATIONS):
        words = [rng.choice(texts) for _ in range(8)]
        call = {"type": "function", "function": {"name": "python", "arguments": {"code": words[2]}}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": words[0]},
            {"role": "assistant", "content": "", "reasoning_content": words[1], "tool_calls": [call]},
            {"role": "tool", "content": words[3]},
            {"role": "assistant", "content": words[4], "reasoning_content": words[5]},
        ]
        if number % 3 == 0:
            messages += [{"role": "user", "content": words[6]}, {"role": "assistant", "content": words[7]}]
        made.append({"messages": messages, "tools": [TOOL]})
    return made


def tokenizer_of(texts: list[str], template: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer
    backend.train_from_iterator(texts, trainer(vocab_size=8_000, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=template)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", type=Path)
    parser.add_argument("--template", type=Path, required=True)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core
    texts = [json.loads(line)["problem"] for line in options.problems.read_text().splitlines()]
    tokenizer = tokenizer_of(texts, options.template.read_text())
    chat, lines = chat_of(tokenizer, instruct=False), [json.dumps(row) for row in rows(texts)]
    chunks = [lines[first : first + CHUNK] for first in range(0, len(lines), CHUNK)]

    def alone(chunk: list[str]) -> int:
        """Rendered whole and encoded: no mask, and no turn as it is sampled."""
        written = [
            tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
            for row in map(json.loads, chunk)
        ]
        return sum(map(len, tokenizer(written, add_special_tokens=False)["input_ids"]))

    def planned(chunk: list[str]) -> int:
        examples, problems = encode(chat, [conversation(json.loads(line), "") for line in chunk], max_tokens=10**6)
        assert not problems, problems[0]
        return sum(len(example.token_ids) for example in examples)

    def rate(work: Callable[[list[str]], int]) -> float:
        started_s = time.process_time()
        tokens = sum(map(work, chunks))
        return tokens / (time.process_time() - started_s)

    for work in (alone, planned):
        rate(work)  # warm
    pairs = [(rate(planned), rate(alone)) for _ in range(ROUNDS)]
    ratios = [ours / theirs for ours, theirs in pairs]
    print(
        json.dumps(
            {
                "planned_tokens_per_s": round(statistics.median(ours for ours, _ in pairs)),
                "alone_tokens_per_s": round(statistics.median(theirs for _, theirs in pairs)),
                "ratio": round(statistics.median(ratios), 2),
                "ratios": [round(ratio, 2) for ratio in sorted(ratios)],
            }
        )
    )


if __name__ == "__main__":
    main()
