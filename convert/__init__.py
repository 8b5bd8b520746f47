"""Owns the way from other checkpoints to the canonical one, and its checks.

Run as `python -m convert`. Streams: no source file and no array is ever whole
in memory. Does not know about speculation, requests or kernels' tiles. Read
`rules.py` first, then `plan.py`, `leaf.py` and `write.py`.
"""
