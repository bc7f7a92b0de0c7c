"""Tests of the backend for fp16 with a torch optimizer."""
