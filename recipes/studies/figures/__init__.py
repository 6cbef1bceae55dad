"""The figures: each reads a folder of finished runs and draws; none of them trains."""
