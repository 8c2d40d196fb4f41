"""See design: the checkpoint layer."""
