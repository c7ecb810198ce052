"""Types that the maintenance methods of a store return, and ``salvage`` for a SQLite file that does not open.

Call the methods: ``store.check()``, ``store.repair()``, ``store.backup()``, ``store.newest_good()``, ``store.stats()``,
``thread.check()``.
"""

from backstay.maintenance.backup import salvage
from backstay.maintenance.check import NewestGood
from backstay.maintenance.quarantine import Quarantined, read_quarantine
from backstay.maintenance.report import RepairAction, Report
from backstay.maintenance.stats import Stats, ThreadStats
from backstay.store.finding import Finding

__all__ = [
    "Finding",
    "NewestGood",
    "Quarantined",
    "RepairAction",
    "Report",
    "Stats",
    "ThreadStats",
    "read_quarantine",
    "salvage",
]
