"""Upkeep: looking after what is stored. ``check`` finds what is wrong, ``repair`` puts right what can be."""

from backstay.upkeep.check import check
from backstay.upkeep.newest import Recovered, newest_good
from backstay.upkeep.quarantine import Quarantined, read_quarantine
from backstay.upkeep.repair import repair
from backstay.upkeep.report import Action, CheckReport, RepairReport

__all__ = [
    "Action",
    "CheckReport",
    "Quarantined",
    "Recovered",
    "RepairReport",
    "check",
    "newest_good",
    "read_quarantine",
    "repair",
]
