"""The DeepSpeed learner: a group of ranks that start, train and fail together."""
