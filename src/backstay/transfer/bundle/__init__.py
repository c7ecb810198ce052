"""The bundle: everything a store keeps of some threads, in one file, the same bytes whichever kind of store it was."""
