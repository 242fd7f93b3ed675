"""Text to tokens and back: prompts, tool calls and their results, by the model's own template."""
