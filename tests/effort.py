"""How much work random and crash tests do: BACKSTAY_EFFORT=10 does ten times as much."""

import os


def effort() -> int:
    return max(1, int(os.environ.get("BACKSTAY_EFFORT", "1")))
