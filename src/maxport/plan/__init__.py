"""See design: the plan layer."""
