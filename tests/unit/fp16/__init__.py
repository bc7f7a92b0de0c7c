"""Tests of the wing for fp16 with a torch optimizer."""
