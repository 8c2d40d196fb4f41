"""Architectures, graphs, evaluation, compilation: the only package that imports `max`."""
