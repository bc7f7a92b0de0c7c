"""The seams that audit NeMo-RL's optimizers and the weights that it sends."""
