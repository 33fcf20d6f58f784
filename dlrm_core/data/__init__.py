"""Batches: where they come from and how they reach the training loop."""
