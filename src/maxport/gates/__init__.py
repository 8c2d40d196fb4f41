"""See design: the gates layer."""
