"""The method: what a bottleneck computes, and the layers of a model that apply it."""
