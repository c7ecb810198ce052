"""A state as pieces of append-only streams and blobs, so that a save writes only the new bytes. No I/O."""
