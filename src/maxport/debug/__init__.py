"""See design: the debug layer."""
