"""How much work random and crash tests do: HOLDFAST_EFFORT=10 does ten times as much."""

import os


def effort() -> int:
    return max(1, int(os.environ.get("HOLDFAST_EFFORT", "1")))
