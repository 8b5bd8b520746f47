"""Owns requests, pages, text and the loop that drives the model.

Does not know about HTTP or JSON. Read `request.py` first, then `engine.py`.
"""

from ddtree_jax.config import EngineConfig
from ddtree_jax.engine.chat import ChatTemplate
from ddtree_jax.engine.engine import Engine
from ddtree_jax.engine.request import (
    Completion,
    Delta,
    FinishReason,
    Request,
    SamplingParams,
)
from ddtree_jax.engine.token_codec import Tokenizer

__all__ = [
    "ChatTemplate",
    "Completion",
    "Delta",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Request",
    "SamplingParams",
    "Tokenizer",
]
