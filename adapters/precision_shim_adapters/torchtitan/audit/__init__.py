"""The seams that audit torchtitan's optimizers and the weights that it sends."""
