"""The dtypes in which the engines of a verl job compute, and their weights."""
