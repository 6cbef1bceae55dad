"""Many runs of a recipe, as trials of Optuna studies. Not `sweep`, which is the name of the script."""
