"""The words, the maths and the loop of GRPO-RoC training (arXiv:2508.20722), without Ray, vLLM or DeepSpeed."""
