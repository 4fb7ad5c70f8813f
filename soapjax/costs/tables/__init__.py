"""From graph, space, topology and profile to the arrays that all programs of costs read."""
