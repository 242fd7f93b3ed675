"""What a run trains on: problems, conversations, and the order they are drawn in."""
