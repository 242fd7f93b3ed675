"""Between text and tokens: prompts, tool calls and their answers, by the model's own template."""
