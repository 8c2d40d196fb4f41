"""A running MAX server: starting it with a port, asking it, and comparing it with the reference."""
