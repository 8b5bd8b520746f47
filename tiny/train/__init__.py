"""Owns how the bundled small model is trained, in stages that resume.

    python -m tiny.train corpus | target | quantise | draft | export

Parameters are flat dictionaries from the paths of `ddtree_jax.model.params`; the
routed experts are plain arrays at `moe/experts/{gate,up,down}` until they are
quantised. Read `__main__.py` first, then `target_model.py`.
"""
