"""The operations on threads: plain functions that take the store first."""
