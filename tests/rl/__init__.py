"""Whole GRPO runs on a CPU (examples/demo/rl): verl 0.9.1's ``main_ppo``, Ray, the real vLLM."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # no wheel contains the demo
