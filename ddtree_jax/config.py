"""Owns the frozen model configurations. Does not know about arrays or devices.

Model numbers come from a checkpoint's `config.json` (see `hf_config.py`, which
reads every form of it); no number of Kimi K2.6 is a default here.
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from ddtree_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """Rotary frequencies: plain RoPE scaled by YaRN (arXiv 2309.00071).

    Attributes:
      theta: Base of the frequencies.
      factor: Context extension; 1.0 means no scaling.
      beta_fast: Rotations above which a frequency is kept.
      beta_slow: Rotations below which a frequency is divided by `factor`.
      mscale: Numerator of the amplitude correction.
      mscale_all_dim: Denominator, and the correction of the softmax scale.
      original_max_position_embeddings: Context length, in tokens, before YaRN.
    """

    theta: float
    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    original_max_position_embeddings: int

    def attention_multiplier(self, scale: float) -> float:
        """Returns m(s) = 0.1 s ln(factor) + 1, and 1 without extension."""
        return 1.0 if self.factor <= 1.0 else 0.1 * scale * math.log(self.factor) + 1.0

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin: m(mscale) / m(mscale_all_dim)."""
        return self.attention_multiplier(self.mscale) / self.attention_multiplier(
            self.mscale_all_dim
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The target: names and values of `text_config` in Hugging Face's config.json.

    Attributes:
      latent_norm_eps: Epsilon of `q_a_layernorm` and `kv_a_layernorm`. Hugging
        Face uses 1e-6 whatever `rms_norm_eps` says; SGLang and vLLM use
        `rms_norm_eps`.
      initializer_range: Standard deviation of random initialisation.
      (the others as in config.json)
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    first_k_dense_replace: int
    routed_scaling_factor: float
    rms_norm_eps: float
    latent_norm_eps: float
    max_position_embeddings: int
    rope: YarnConfig
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    initializer_range: float

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: nope and rope parts."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def softmax_scale(self) -> float:
        """Factor on attention logits, YaRN's m(mscale_all_dim)² included."""
        m = self.rope.attention_multiplier(self.rope.mscale_all_dim)
        return self.qk_head_dim**-0.5 * m * m


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The DFlash drafter (arXiv 2602.06036); Qwen3-style names of its config.json.

    Attributes:
      draft_block_size: Positions filled at once, the known root token included.
      target_layer_ids: 0-based target layers whose outputs are the features.
      mask_token_id: Fills the unknown positions of the block.
      rope_amplitude: Factor on cos and sin. Engines disagree (1.0, or
        0.1 ln(factor) + 1 as z-lab's published acceptance was measured).
      (the others as in config.json)
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: YarnConfig
    rope_amplitude: float
    draft_block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    initializer_range: float

    @property
    def draft_horizon(self) -> int:
        """Positions that one draft predicts: the block without its root."""
        return self.draft_block_size - 1


DEFAULT_MAX_CONTEXT_LEN = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is made of.

    Attributes:
      model: Converted checkpoint directory of the target.
      draft: That of the drafter. None takes `model`/draft if it exists;
        without a drafter decoding is plain.
      devices: Devices of the mesh; None takes all.
      slots: Requests that run at once.
      tree_budget: Draft nodes a step, without the root; 0 is plain decoding.
      page_size: Tokens a page.
      max_context_len: Most tokens of a request, prompt and answer; None takes
        the model's limit, but at most `DEFAULT_MAX_CONTEXT_LEN`.
      num_pages: Pages of the cache; None takes enough for all slots at
        `max_context_len`.
      prefill_chunk: Most prompt tokens that one forward pass takes.
      dtype: Of activations, caches and unquantised weights.
      latent_norm_eps: Overrides `ModelConfig.latent_norm_eps`.
      rope_amplitude: Overrides `DraftConfig.rope_amplitude`.
    """

    model: Path
    draft: Path | None = None
    devices: int | None = None
    slots: int = 8
    tree_budget: int = 32
    page_size: int = 64
    max_context_len: int | None = None
    num_pages: int | None = None
    prefill_chunk: int = 256
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    latent_norm_eps: float | None = None
    rope_amplitude: float | None = None

    def __post_init__(self):
        """Raises ConfigError for a size that is no size."""
        least = {"slots": 1, "tree_budget": 0, "page_size": 1, "prefill_chunk": 1}
        for name in ("devices", "max_context_len", "num_pages"):
            if getattr(self, name) is not None:
                least[name] = 1
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(
                    f"{name} must be at least {bound}, got {getattr(self, name)}"
                )
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"dtype must be bfloat16 or float32, got {self.dtype!r}")
