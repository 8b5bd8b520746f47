"""Owns timings, their records, and the tables made of them. Asserts nothing.

`python -m bench --help` lists the commands; `timing.py` is the only timer. Nothing
imports this package.
"""
