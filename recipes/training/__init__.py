"""What every recipe shares: arguments, data, models, methods, runs and their results, and the Trainer."""
