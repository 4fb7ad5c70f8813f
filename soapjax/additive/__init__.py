"""Costs that are sums over nodes and edges, with memory under a limit: the contest's problems. No planner uses it."""
