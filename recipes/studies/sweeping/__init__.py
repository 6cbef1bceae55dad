"""Sweeps: the planned runs, how they are executed, and the search that chooses among them."""
