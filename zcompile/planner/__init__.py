"""Planning: what a step will take in memory and time, from the graphs that would run, without running them."""
