"""Where adapters go: from a model and a configuration to modules, and to the owners of shared
bottlenecks.
"""
