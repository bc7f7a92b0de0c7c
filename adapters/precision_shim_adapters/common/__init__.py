"""Shapes of libraries that several frameworks use: Ray's actors, OmegaConf's configs, Megatron's keys."""
