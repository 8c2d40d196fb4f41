"""See design: the emit layer."""
