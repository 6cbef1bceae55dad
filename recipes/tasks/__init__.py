"""What is trained: the tasks, their data and their scores."""
