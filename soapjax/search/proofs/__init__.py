"""Bounds and optima: lower bounds, exhaustive search, shortest paths."""
