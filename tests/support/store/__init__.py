"""Faults and hostile surroundings for stores."""
