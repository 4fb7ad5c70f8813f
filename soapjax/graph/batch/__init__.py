"""How a step's values depend on its batch: means, sums, statistics, and where samples mix."""
