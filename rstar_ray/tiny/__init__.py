"""The tiny world: generated problems, a tokenizer made on the spot and a model with random weights."""
