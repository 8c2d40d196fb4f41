"""See design: the migrate layer."""
