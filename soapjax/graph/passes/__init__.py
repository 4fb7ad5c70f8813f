"""From equations and their rules to operators, tasks, parameters and tensors; `build.py` is the door."""
