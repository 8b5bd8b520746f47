"""Owns the reading of Hugging Face's config.json into this project's configs.

Every number comes from the file. A key that would change the arithmetic is
honoured or refused by name; a key without influence stands in a list with its
reason; anything else is reported by `config_deviations`.

Does not know about tensors, JAX or devices. Read `target.py` first.
"""

from ddtree_jax.hf_config.doctor import config_deviations
from ddtree_jax.hf_config.draft import check_draft_fits, read_draft_config
from ddtree_jax.hf_config.quantisation import read_quantisation
from ddtree_jax.hf_config.target import read_model_config, read_stop_token_ids

__all__ = [
    "check_draft_fits",
    "config_deviations",
    "read_draft_config",
    "read_model_config",
    "read_quantisation",
    "read_stop_token_ids",
]
