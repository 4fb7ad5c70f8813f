"""What every room may use and what knows none of them: files, sizes, interrupts, the configuration of JAX."""
