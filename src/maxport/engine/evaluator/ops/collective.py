"""Ops of this family follow."""
