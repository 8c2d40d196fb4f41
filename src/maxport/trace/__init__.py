"""See design: the trace layer."""
