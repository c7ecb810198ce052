"""Tools for testing code that uses Backstay: strategies for values, and the contract of a store."""
