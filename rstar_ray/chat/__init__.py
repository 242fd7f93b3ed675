"""Converts text to tokens and back: prompts, tool calls and their results, with the model's chat template."""
