"""From a step and the shapes of its arguments to one flat list of equations; `tracing.py` is the door."""
