"""Records what happens inside transformers' models. Changes nothing in them."""

import contextlib
import dataclasses

import torch
from transformers import DynamicCache


@dataclasses.dataclass
class Trace:
    """What one forward pass over one sequence of T tokens computed.

    Attributes:
      logits: [T, vocab].
      hidden_states: [layers + 1, T, hidden]; 0 is the embedding, i + 1 the
        residual stream after layer i. No final norm, unlike the last entry of
        transformers' own list.
      final_norm: [T, hidden], what the head is applied to.
      experts: [moe layers, T, top k], ascending.
      expert_weights: [moe layers, T, top k], in the order of `experts`.
      router_margin: [moe layers, T], how far the last chosen biased score lies
        above the first one not chosen.
      bias_changed_choice: [moe layers, T], whether the unbiased scores would
        have chosen another set.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor
    final_norm: torch.Tensor
    experts: torch.Tensor
    expert_weights: torch.Tensor
    router_margin: torch.Tensor
    bias_changed_choice: torch.Tensor


@contextlib.contextmanager
def _hooks(modules, function):
    handles = [module.register_forward_hook(function) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _router_facts(gate, outputs):
    router_logits, weights, indices = outputs
    scores = router_logits.sigmoid()
    biased = scores + gate.e_score_correction_bias
    top = biased.topk(gate.top_k + 1, dim=-1).values
    experts, order = indices.sort(dim=-1)
    unbiased = scores.topk(gate.top_k, dim=-1).indices.sort(dim=-1).values
    return {
        "experts": experts,
        "expert_weights": weights.gather(-1, order),
        "router_margin": top[:, -2] - top[:, -1],
        "bias_changed_choice": (experts != unbiased).any(-1),
    }


@torch.no_grad()
def trace(
    model: torch.nn.Module, ids: list[int], cache: DynamicCache | None = None
) -> Trace:
    """Returns the trace of one pass over `ids`, after what `cache` holds."""
    text = model.get_decoder()  # kimi_k25's lies one level deeper than deepseek_v3's
    residuals, norms, routers = [], [], []

    def on_layer(_, args, output):
        if not residuals:
            residuals.append(args[0][0])
        residuals.append(output[0])

    def on_norm(_, __, output):
        norms.append(output[0])

    def on_gate(gate, _, outputs):
        routers.append(_router_facts(gate, outputs))

    gates = [layer.mlp.gate for layer in text.layers if hasattr(layer.mlp, "gate")]
    with (
        _hooks(text.layers, on_layer),
        _hooks([text.norm], on_norm),
        _hooks(gates, on_gate),
    ):
        output = model(
            torch.tensor([ids]),
            past_key_values=cache,
            use_cache=cache is not None,
            output_hidden_states=True,
        )
    hidden_states = torch.stack(residuals)
    # transformers' own list agrees except for its last, which is normed.
    theirs = torch.stack([state[0] for state in output.hidden_states[:-1]])
    assert torch.equal(hidden_states[:-1], theirs)
    assert torch.equal(norms[0], output.hidden_states[-1][0])
    stacked = {key: torch.stack([r[key] for r in routers]) for key in routers[0]}
    return Trace(output.logits[0], hidden_states, norms[0], **stacked)


def trace_stepwise(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Returns the logits [T, vocab] of feeding one token at a time."""
    cache = DynamicCache(config=model.config.get_text_config())
    return torch.cat([trace(model, [token], cache).logits for token in ids])
