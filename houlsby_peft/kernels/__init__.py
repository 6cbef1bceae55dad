"""What an adapter computes at a place, as one operation of PyTorch; `door.py` is the way in."""
