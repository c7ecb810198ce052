"""The directory store: plain append-only logs in a directory, one for each branch."""
