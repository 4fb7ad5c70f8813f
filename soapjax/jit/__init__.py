"""How the planner compiles itself."""
