"""The DeepSpeed learner: a gang of ranks."""
