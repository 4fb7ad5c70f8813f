"""Makes strategies good before and after the chains: steepest descents, repeated blocks, fewer reshards."""
