"""One directory store, many processes that save, load, delete and compact at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.running import Show, effort
from support.simulation.prune_load import EVERYTHING, SEED, run_load

LOAD_SECONDS = max(2.0, 0.5 * effort())


@pytest.mark.effort
def test_what_is_deleted_and_written_anew_meanwhile_never_breaks_what_is_saved_or_read(
    tmp_path: Path, show: Show
) -> None:
    """Five processes save, load, delete, prune and compact: whoever holds places in a log sees it move all the time."""
    load = run_load(f"dir:{tmp_path}/store", tmp_path, EVERYTHING, LOAD_SECONDS)

    show("prune and save on a directory", f"seed {SEED}, {load}")
    assert load.told.wrong == [], load.told.wrong[0]
    assert [finding for finding in load.found if not finding.startswith("leftover")] == []
    assert load.counts["deleted"] > min(20, 2 * effort())
    assert load.counts["compact ok"] > 0
    assert load.told.loads
