"""What Holdfast costs, measured against the disk, a bare SQLite and its peers: ``python -m benchmarks``."""
