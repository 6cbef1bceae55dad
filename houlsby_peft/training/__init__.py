"""What a training loop may add: kept hidden states, steps as CUDA graphs, AdapterDrop."""
