"""Shapes that several frameworks share: Ray's actors, OmegaConf's configs, Megatron's keys."""
