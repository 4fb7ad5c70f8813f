"""Flax training steps to plan for: every module has ``make(**sizes) -> (train_step, state, batch)``."""
