"""What is learned: each task's data, labels and scores."""
