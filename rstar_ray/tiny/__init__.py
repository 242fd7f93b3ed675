"""The tiny world: generated problems, a generated tokenizer and a model with random weights."""
