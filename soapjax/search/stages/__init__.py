"""Pipelines: the grid that people tune by hand, priced by formula, then stages searched together from its best."""
