"""Tools for testing code that uses Backstay: value strategies, the store contract, the history checker."""
