"""The real vLLM on a CPU, alone and together with the frameworks' trainers."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # no wheel contains benchmarks and demo
