"""Graphs that tests of the engine share."""
