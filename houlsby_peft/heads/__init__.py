"""Task heads: found in a model, given to an adapter, and what they predict."""
