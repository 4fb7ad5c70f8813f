"""From a traced step to its operator graph: plain figures, without types of JAX (`operators.py`)."""
