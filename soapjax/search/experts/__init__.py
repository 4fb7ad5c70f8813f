"""Strategies that people write by hand: data, tensor and model parallelism, layers on devices."""
