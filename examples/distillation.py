"""On-policy distillation: the policy samples, and a larger model of the same vocabulary teaches token by token.

python -m vllm.entrypoints.openai.api_server --model TEACHER --host 127.0.0.1 --port 8100 --max-model-len 32769
python recipes/stage1.py --model STUDENT --algorithm.reference-model http://127.0.0.1:8100 --own-folder examples \\
    --algorithm.loss distillation:reverse_kl --algorithm.resample none --algorithm.no-reject-equal-reward \\
    --run-dir runs/distillation

The loss is the policy gradient of the reverse KL divergence, KL(policy || teacher), as in MiniLLM (arXiv:2306.08543)
and GKD (arXiv:2306.13649) with on-policy data. Rewards are only measured. The teacher must have the policy's tokenizer:
a run with another one is refused.

A separate vLLM server holds the teacher and gives the log-probs of the rows that are trained on. It needs room for one
token more than --engine.max-context-tokens, and memory for float32 logits of a whole prefill step: if that is short,
start it with a lower --max-num-batched-tokens. A small teacher may be a folder instead, --algorithm.reference-model
TEACHER: then each learner rank loads the whole model.
"""

import torch
from torch import Tensor


def reverse_kl(tokens, algorithm) -> Tensor:
    """The loss [N] of each sampled token: its ratio times log policy - log teacher, which is held fixed.

    The gradient's expectation over sampled tokens is that of the KL divergence of the next token.
    """
    gap_N = (tokens.logprobs_N - tokens.ref_logprobs_N).detach()
    return torch.exp(tokens.logprobs_N - tokens.old_logprobs_N) * gap_N
