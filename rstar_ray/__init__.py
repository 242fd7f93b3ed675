"""The words, the maths and the loop of GRPO-RoC training (arXiv:2508.20722); knows neither Ray nor vLLM nor DeepSpeed."""
