"""Seconds and bytes of a strategy: compute, collectives, resharding, memory.

`tables` make a problem into arrays, `rules` and `memory` say every rule once, `whole.py` and `change.py` apply them to whole
strategies and to changes of one operator. What XLA adds is in `compilers`, what was measured in `measured`.
"""
