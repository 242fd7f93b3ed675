"""Transfer of weights from the learner to the engines."""
