"""Owns the two models: parameters, forward passes and the pages of their caches.

Does not know about speculation, requests, tokens as text or files' formats.
Read `params.py` first, then `transformer.py`.
"""
