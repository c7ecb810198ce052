"""Tools for testing code that uses Holdfast: strategies for values, and the contract of a store."""
