"""What a plan may choose (`space.py`), what it chose (`configs.py`), and the file that says so (`plan.py`)."""
