"""Records, mathematics and training loop of GRPO-RoC (arXiv:2508.20722), without Ray, vLLM or DeepSpeed."""
