"""Bytes to durable records: the contract (``base``), then the stores that keep it."""
