"""Bytes of a state to what is new of them, and back: piece tables over append-only streams. No I/O."""
