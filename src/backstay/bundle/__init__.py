"""Bundles: threads of a store in one portable file, which any other store can import."""

from __future__ import annotations

from backstay.bundle.blocks import BundleLimits
from backstay.bundle.exporter import export_bundle
from backstay.bundle.importer import import_bundle
from backstay.bundle.reader import Totals, check_bundle, read_bundle
from backstay.bundle.report import ExportReport, ImportReport, Note, Refused

__all__ = [
    "BundleLimits",
    "ExportReport",
    "ImportReport",
    "Note",
    "Refused",
    "Totals",
    "check_bundle",
    "export_bundle",
    "import_bundle",
    "read_bundle",
]
