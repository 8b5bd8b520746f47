"""Owns the forms of the rotary settings in a config.json.

rope_scaling {type | rope_type, factor, …} + rope_theta     as published
rope_parameters {rope_type, rope_theta, factor, …}          transformers 5
"""

from ddtree_jax.config import YarnConfig
from ddtree_jax.hf_config.fields import Fields, Json, same

_BLOCKS = ("rope_scaling", "rope_parameters")
_YARN_KEYS = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ORIGINAL = "original_max_position_embeddings"
_NEUTRAL: dict[str, tuple[Json, ...]] = {
    "attention_factor": (None,),
    "partial_rotary_factor": (None, 1.0),
    "truncate": (None, True),
}


def read_yarn(config: Fields) -> YarnConfig:
    """Returns the rotary settings of one model, whichever form they have.

    Raises:
      ConfigError: A key is missing, unknown, unsupported or contradicts another.
    """
    block = _merged_block(config)
    theta = _theta(config, block)
    kind = _kind(block)
    _refuse_unknown(block, kind)
    if kind == "default":
        # Factor 1 makes YaRN's ramp the identity, whatever its borders are.
        return YarnConfig(
            theta=theta,
            factor=1.0,
            beta_fast=1.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=config.integer("max_position_embeddings"),
        )
    numbers = {key: block.number(key) for key in _YARN_KEYS}
    if numbers["factor"] < 1:
        raise block.error(f"factor is {numbers['factor']}; expected a number ≥ 1")
    if numbers["beta_fast"] < numbers["beta_slow"]:
        raise block.error(
            f"beta_fast is {numbers['beta_fast']}; expected at least beta_slow, "
            f"{numbers['beta_slow']}"
        )
    return YarnConfig(
        theta=theta,
        original_max_position_embeddings=block.integer(_ORIGINAL),
        **numbers,
    )


def _merged_block(config: Fields) -> Fields:
    """Returns the one block of rotary settings; an explicit null is plain RoPE."""
    present = [key for key in _BLOCKS if key in config]
    if not present:
        raise config.error(
            "rope_scaling (or rope_parameters) is missing; expected an object with "
            f"type, {', '.join(_YARN_KEYS)} and {_ORIGINAL}"
        )
    merged: dict[str, Json] = {}
    used = [key for key in present if config.get(key) is not None]
    for key in used:
        for inner, value in config.child(key).values.items():
            if not same(merged.setdefault(inner, value), value):
                raise config.error(
                    f"rope_scaling and rope_parameters disagree on {inner}"
                )
    if not used:
        merged = {"type": "default"}
    return Fields(merged, f"{config.name}: {(used or present)[0]}")


def _theta(config: Fields, block: Fields) -> float:
    holders = [place for place in (config, block) if "rope_theta" in place]
    if not holders:
        raise config.error("rope_theta is missing; expected a positive number")
    values = [place.number("rope_theta") for place in holders]
    if len(set(values)) > 1:
        raise config.error(
            f"rope_theta is {values[0]} outside and {values[1]} inside the rope "
            "block; expected one value"
        )
    return values[0]


def _kind(block: Fields) -> str:
    keys = [key for key in ("type", "rope_type") if key in block]
    if not keys:
        raise block.error('type (or rope_type) is missing; expected "yarn"')
    if len(keys) == 2 and block.get("type") != block.get("rope_type"):
        raise block.error("type and rope_type disagree; expected one value")
    block.expect(keys[0], "yarn", "default")
    return str(block.get(keys[0]))


def _refuse_unknown(block: Fields, kind: str) -> None:
    known = {"type", "rope_type", "rope_theta", *_NEUTRAL}
    if kind == "yarn":
        known |= {*_YARN_KEYS, _ORIGINAL}
    for key in block.values:
        if key not in known:
            raise block.error(f"{key} is not supported for type {kind}")
    for key, allowed in _NEUTRAL.items():
        block.expect(key, *allowed)
