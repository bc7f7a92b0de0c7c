"""The dtypes in which the engines of a SkyRL job compute, and their weights."""
