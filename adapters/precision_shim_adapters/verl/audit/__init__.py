"""The seams that audit verl's optimizers and the weights that it sends."""
