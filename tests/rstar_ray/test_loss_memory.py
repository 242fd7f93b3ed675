"""Log-probs over a large vocabulary never hold a [tokens, vocabulary] matrix; measured in a separate process."""

import subprocess
import sys

import pytest

TOKENS, VOCABULARY, HIDDEN, CHUNK = 256, 50_000, 8, 4

PROBE = f"""
import pathlib, torch
from rstar_ray.algorithm.loss import token_logprobs
torch.set_num_threads(1)
hidden = torch.randn({TOKENS}, {HIDDEN}, requires_grad=True)
weight = torch.randn({VOCABULARY}, {HIDDEN}, requires_grad=True)
targets = torch.arange({TOKENS})
def peak_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
token_logprobs(hidden[:2], weight[:100], targets[:2], chunk_tokens=2, temperature=1.0)[0].sum().backward()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak so far, forgotten
before = peak_bytes()
logprobs, entropy = token_logprobs(hidden, weight, targets, chunk_tokens={CHUNK}, temperature=1.0)
(logprobs.sum() + entropy.sum()).backward()
print(peak_bytes() - before)
"""


@pytest.mark.long
def test_the_peak_is_a_few_chunks_of_logits_not_the_whole_matrix():
    grown = int(subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout)
    # One whole matrix would be the least that a plain log-softmax holds; with its gradient it is three.
    assert grown < TOKENS * VOCABULARY * 4 / 2
