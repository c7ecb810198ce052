"""Moving checkpoints: between stores as a bundle, and out of the files and tables of other systems."""

from __future__ import annotations

from backstay.transfer.bundle.export import export_bundle
from backstay.transfer.bundle.limits import BundleLimits
from backstay.transfer.bundle.load import import_bundle
from backstay.transfer.bundle.reader import Totals, read_bundle, verify_bundle
from backstay.transfer.report import ExportReport, ImportReport, Note, Refused

__all__ = [
    "BundleLimits",
    "ExportReport",
    "ImportReport",
    "Note",
    "Refused",
    "Totals",
    "export_bundle",
    "import_bundle",
    "read_bundle",
    "verify_bundle",
]
