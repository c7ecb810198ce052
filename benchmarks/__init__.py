"""What Backstay costs, measured against the disk, bare databases and its peers: ``python -m benchmarks``."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for ``support.postgres``, the server that tests start too
