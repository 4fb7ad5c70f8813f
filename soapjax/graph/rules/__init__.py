"""How the dims of an equation's operands and results relate, and its FLOPs: one rule per primitive."""
