"""The seams at verl's checkpoints."""
