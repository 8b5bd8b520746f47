"""Owns measurements of what drafting is worth: acceptance, and what limits it.

`python -m ddtree_jax.research accept | slots`, described in docs/research.md. Does not
know about tokenizers, requests or HTTP: prompts come as token ids. Read
`acceptance.py` first.
"""
