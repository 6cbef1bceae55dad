"""Saved adapters: what a file must hold and may hold, and what is recorded in it."""
