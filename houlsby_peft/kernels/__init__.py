"""What an adapter computes at a place, as one operation of PyTorch instead of many."""
