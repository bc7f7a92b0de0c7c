"""The wheel lacks the demo, so these tests import it from the clone."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
