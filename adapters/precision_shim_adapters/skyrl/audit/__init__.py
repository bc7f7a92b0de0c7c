"""The seams that audit SkyRL's optimizers and the weights that it sends."""
