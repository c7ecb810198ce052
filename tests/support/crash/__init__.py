"""Processes that are killed, and what they must leave behind."""
