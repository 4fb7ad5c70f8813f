"""Policies that learn where operators go: `reinforce`, `hierarchical` and `trinity`."""
