"""See design: the idioms layer."""
