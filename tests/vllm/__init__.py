"""The real vLLM on a CPU, alone and beside trainers of the frameworks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks and demo are in no wheel
