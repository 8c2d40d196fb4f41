"""See design: the verify layer."""
