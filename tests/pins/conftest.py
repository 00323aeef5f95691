"""For the pins: the worlds of other folders."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for folder in ("peer/daemon", "peer/stages", "peer/training"):
    sys.path.append(str(TESTS / folder))
