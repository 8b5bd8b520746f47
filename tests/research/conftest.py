"""Random models of eight tokens, whose drafts are often right."""

import pytest

from ddtree_jax.mesh import make_mesh
from ddtree_jax.research.decode import Decoder
from ddtree_jax.research.models import Models
from tests.research.replay import Replay
from tests.support.random_model import random_tiny


@pytest.fixture(scope="session")
def models() -> Models:
    """On one device; nothing stops a text."""
    tiny = random_tiny(make_mesh(1), vocab_size=8)
    return Models(*tiny, dtype="float32", stop_token_ids=())


@pytest.fixture(scope="session")
def decoder(models) -> Decoder:
    """Fewer slots than prompts, so that slots are used again."""
    return Decoder(models, slots=3, max_rows=80)


@pytest.fixture(scope="session")
def replay(models) -> Replay:
    """The same models without steps, caches and trees."""
    return Replay(models)
