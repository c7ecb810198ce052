"""Importing from the tables of LangGraph's own savers."""
