"""Other people's training loops. Each module needs an extra and is imported by its own name."""
