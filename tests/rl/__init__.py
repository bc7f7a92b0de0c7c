"""Whole GRPO runs: verl 0.9.1's ``main_ppo``, Ray and the real vLLM on a CPU: examples/demo/rl."""
