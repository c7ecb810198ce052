"""Upkeep: looking after what is stored. ``check`` finds what is wrong, ``repair`` puts right what can be."""

from holdfast.upkeep.check import check
from holdfast.upkeep.newest import Recovered, newest_good
from holdfast.upkeep.quarantine import Quarantined, read_quarantine
from holdfast.upkeep.repair import repair
from holdfast.upkeep.report import Action, CheckReport, RepairReport

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
