"""Owns the ways between other checkpoints and the canonical one, and their checks.

Run as `python -m convert`. Every source is seen as one set of tensors, under Hugging
Face's names, and every target is written from it. Streams: no source file and no
array is ever whole in memory. Does not know about speculation, requests or kernels'
tiles. Read `tensor.py` and `checkpoint.py` first, then `rules.py` and `plan.py`.
"""
