"""Pipelines and micro-batches: searched, priced as they run, written and read."""
