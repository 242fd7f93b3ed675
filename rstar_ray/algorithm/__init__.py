"""The maths of GRPO-RoC: resampling, advantages, batches, the loss, the schedule."""
