"""A step cut into parts that run as programs of their own: stages, their passes and updates, and the loops within them."""
