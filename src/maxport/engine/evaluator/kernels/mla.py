"""Kernels of this family follow."""
