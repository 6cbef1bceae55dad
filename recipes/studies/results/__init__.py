"""The results of finished runs, arranged beside the papers' numbers."""
