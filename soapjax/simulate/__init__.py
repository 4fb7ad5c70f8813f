"""Step time from seconds of tasks: the event simulator is the reference, the batched one what searches use."""
