"""See design: the engine layer."""
