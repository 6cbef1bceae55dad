"""The error for mistakes in what was asked of a recipe."""


class RecipeError(Exception):
    """A wrong flag, file or value. The message says the rule, what was found and what to do; recipes print it alone,
    without a traceback."""
