"""Log-probs over a large vocabulary never hold a [tokens, vocabulary] matrix; measured in a process of its own."""

import subprocess
import sys

TOKENS, VOCABULARY, HIDDEN, CHUNK = 512, 150_000, 16, 32

PROBE = f"""
import resource, torch
from rstar_ray.loss import token_logprobs
torch.set_num_threads(1)
hidden = torch.randn({TOKENS}, {HIDDEN}, requires_grad=True)
weight = torch.randn({VOCABULARY}, {HIDDEN}, requires_grad=True)
targets = torch.arange({TOKENS})
def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
token_logprobs(hidden[:2], weight[:100], targets[:2], chunk_tokens=2)[0].sum().backward()
before = peak_bytes()
logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_tokens={CHUNK})
(logprobs.sum() + entropy.sum()).backward()
print(peak_bytes() - before)
"""


def test_the_peak_is_a_few_chunks_of_logits_not_the_whole_matrix():
    grown = int(subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout)
    chunk_bytes, whole_bytes = CHUNK * VOCABULARY * 4, TOKENS * VOCABULARY * 4
    # The chunk's logits, probabilities and what arithmetic holds for a moment; gradients of 10 MB beside them.
    assert grown < 5 * chunk_bytes + 2**26
    assert grown < whole_bytes / 2
