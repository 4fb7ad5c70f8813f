"""Runs a plan. Reads a traced step and what the plan says of it; nothing of costs, simulators or search."""
