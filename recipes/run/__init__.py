"""What the training recipes share; docs/recipes.md describes it."""
