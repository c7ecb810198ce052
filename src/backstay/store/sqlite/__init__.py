"""The SQLite store: one file, many threads and processes."""
