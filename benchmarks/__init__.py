"""What Backstay costs, measured against the disk, bare databases and its peers: ``python -m benchmarks``."""
