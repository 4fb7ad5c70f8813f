"""Every equation on its local blocks, in one program over one mesh.

`compiled_step.py` makes that a function like `jax.jit`'s.
"""
