"""Reads compiled programs: what they send, compute and store, how long they take, and whether their numbers are right."""
