"""Whole GRPO runs: verl 0.9.1's ``main_ppo``, Ray and the real vLLM on a CPU: examples/demo/rl."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # the demo is in no wheel
