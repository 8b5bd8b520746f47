"""The target's forward pass against transformers' `kimi_k25`."""

import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.model.restore import restore_target
from ddtree_jax.spec import Params
from tests.support.compare import assert_close
from tests.support.models import run_in_chunks

CHUNKS = {
    "prefill": lambda n: [n],
    "token_by_token": lambda n: [1] * n,
    "ragged_chunks": lambda n: [16, 1, 15, n - 32],
}


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("prompt", [0, 1])
def test_logits_equal_transformers(tiny, golden, prompt, chunks):
    data = golden("target_forward")
    ids = data[f"ids_{prompt}"]
    result = run_in_chunks(tiny, ids, CHUNKS[chunks](len(ids)))
    assert_close("golden logits", result.logits[0], data[f"logits_{prompt}"])


def test_hidden_states_and_features_equal_transformers(tiny, golden):
    data = golden("target_forward")
    ids = data["ids_0"]
    # Out of order on purpose: the caller's order is the features' order.
    layers = (3, 0, 2, 1)
    result = run_in_chunks(tiny, ids, [len(ids)], feature_layers=layers)
    for slot, layer in enumerate(layers):
        want = data["hidden_states_0"][layer + 1]
        assert_close("golden hidden states", result.features[0, :, slot], want)
    assert_close("golden hidden states", result.hidden[0], data["final_norm_0"])


def test_other_latent_epsilon_is_visible(tiny1, tiny_checkpoint, golden):
    # SGLang's and vLLM's reading; it must not be mistaken for Hugging Face's.
    data = golden("target_forward")
    config, target = restore_target(
        tiny_checkpoint, tiny1.mesh, dtype=jnp.float32, latent_norm_eps=1e-3
    )
    other = tiny1._replace(config=config, params=Params(target, None))
    ids = data["ids_0"]
    result = run_in_chunks(other, ids, [len(ids)])
    difference = np.abs(result.logits[0] - data["logits_0"]).max()
    assert difference > 1e-3
