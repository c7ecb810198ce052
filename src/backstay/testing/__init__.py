"""For authors of a store: its contract as tests."""
