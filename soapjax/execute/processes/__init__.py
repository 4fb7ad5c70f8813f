"""A job of several processes: all agree before they run, and all end, by name, when one stops.

`soapjax.distributed` is its door.
"""
