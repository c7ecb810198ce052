"""Types that the maintenance methods of a store return: check, repair, newest_good and stats.

Call the methods: ``store.check()``, ``store.repair()``, ``store.newest_good()``, ``store.stats()``, ``thread.check()``.
"""

from backstay.maintenance.check import NewestGood
from backstay.maintenance.quarantine import Quarantined, read_quarantine
from backstay.maintenance.report import RepairAction, Report
from backstay.maintenance.stats import Stats, ThreadStats
from backstay.store.finding import Finding

__all__ = ["Finding", "NewestGood", "Quarantined", "RepairAction", "Report", "Stats", "ThreadStats", "read_quarantine"]
