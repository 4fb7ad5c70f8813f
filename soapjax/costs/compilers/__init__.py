"""What a compiler does with memory and collectives beyond a plan: one `CompilerModel` per backend (`of_backend.py` finds it)."""
