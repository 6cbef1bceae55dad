"""Rows of different adapters in one batch."""
