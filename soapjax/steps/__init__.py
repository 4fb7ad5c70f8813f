"""The user's step: where it is found, how it is called, and the way from a call to its plan and program."""
