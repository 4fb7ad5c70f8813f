"""Planners: from a `PlanningProblem` and a budget to the best strategy found. `planners.py` names them all."""
