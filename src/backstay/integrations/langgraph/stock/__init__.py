"""The tables of LangGraph's own savers, and moving in from them."""
