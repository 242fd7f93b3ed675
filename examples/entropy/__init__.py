"""Where a policy hesitates: tokens of high entropy, by where they stand (arXiv:2508.20722 section 5.4)."""
