"""Owns the small trained model of the repository, and the recipe that made it.

Read docs/tiny.md first. The package never imports this one.
"""
