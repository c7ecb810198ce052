"""Random programs, races and schedules, and the models that judge them."""
