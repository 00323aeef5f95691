"""Peers on hosts of their own: network namespaces (bench/shaped_network.py)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "e2e"))  # its swarm of real processes
