"""Trained adapters in use: loaded with base model, labels and tokenizer, and predicting."""
