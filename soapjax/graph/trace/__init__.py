"""From a step and the shapes of its arguments to one flat list of equations; `trace.py` is the door."""
