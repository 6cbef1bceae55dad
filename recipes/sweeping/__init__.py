"""Many runs of a recipe, on this machine or a cluster. Not `sweep`, which is the name of the script."""
