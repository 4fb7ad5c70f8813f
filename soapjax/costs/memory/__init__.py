"""The peak memory of a device: lifetimes, the order in which values are freed, and what operators need while they run."""
