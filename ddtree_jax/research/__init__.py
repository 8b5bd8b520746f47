"""Owns measurements of what drafting is worth: acceptance, and what limits it.

`python -m ddtree_jax.research accept | slots | agree`, described in docs/research.md;
the last compares texts in bfloat16 with those in float32. Does not
know about tokenizers, requests or HTTP: prompts come as token ids. Read
`acceptance.py` first.
"""
