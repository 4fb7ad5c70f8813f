"""From a request (`request.py`) to a plan and back from its file; `entry.py` is the door."""
