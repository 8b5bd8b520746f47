"""Owns SGLang's own checkpoint forms: sharded_state and presharded.

    ranks, presharded   files  →  each rank's tensors by SGLang's names
    contents            whether a presharded dump's bytes are as its checksums say
    source              each rank's tensors  →  the Hugging Face view
    target              the Hugging Face view  →  each rank's file
    names, vision       which parameter holds what, and how ranks divide it
    division            which rank holds what of the routed experts, in which layout
    layouts, marlin     the bits of the routed experts

Does not know about the canonical checkpoint. Read `names.py` first.
"""
