"""Shapes of libraries that several frameworks use: Ray's actor classes, OmegaConf's configs."""
