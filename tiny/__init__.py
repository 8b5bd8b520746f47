"""Owns the small models that the project makes for itself. Does not know JAX.

Read `random_checkpoint.py` first. The package never imports this one.
"""
