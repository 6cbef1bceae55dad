"""Adapters in use: loaded with their base model and labels, one by one or many side by side."""
