"""The dtypes in which the engines of a torchtitan job compute, and their weights."""
