"""What the papers' analyses share; the scripts beside this folder are launched."""
