"""Graphs, savers and child processes for tests of the LangGraph saver."""
