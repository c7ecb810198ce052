"""PostgreSQL: one schema, workers on many machines."""
