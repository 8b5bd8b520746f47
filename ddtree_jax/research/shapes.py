"""Owns the tree shapes that are compared, each as a step that decodes with it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ddtree_jax.arrays import F32, I32, Array
from ddtree_jax.errors import ConfigError
from ddtree_jax.research.models import Models
from ddtree_jax.spec import make_step
from ddtree_jax.spec.step import StepFunction, TreeBuilder
from ddtree_jax.spec.tree import DraftTree, build, chain

type ShapeName = Literal["plain", "chain", "ddtree"]


class Shape(NamedTuple):
    """A tree shape and its size: `budget` draft nodes, the root not counted."""

    name: ShapeName
    budget: int


def shapes_to_compare(
    names: Sequence[str], budgets: Sequence[int], horizon: int
) -> list[Shape]:
    """Returns the shapes in the order of `names`; only ddtree takes the budgets.

    Plain decoding has budget 0; a chain has one node for each of the `horizon`
    drafted positions.

    Raises:
      ConfigError: A name is unknown, or a budget is no tree's.
    """
    shapes: list[Shape] = []
    for name in dict.fromkeys(names):
        match name:
            case "plain":
                shapes.append(Shape("plain", 0))
            case "chain":
                shapes.append(Shape("chain", horizon))
            case "ddtree":
                if least := [b for b in budgets if b < 1]:
                    raise ConfigError(f"--budgets: {least[0]} is below 1")
                shapes += [Shape("ddtree", b) for b in dict.fromkeys(budgets)]
            case _:
                raise ConfigError(
                    f"--shapes: {name!r} is unknown; expected plain, chain or ddtree"
                )
    return shapes


def spine(
    log_probs: F32[Array, "B D K"],
    token_ids: I32[Array, "B D K"],
    root_token: I32[Array, "B"],
    tree_budget: I32[Array, "B"],
    *,
    num_nodes: int,
) -> DraftTree:
    """Returns the most probable token of each position, one below the other.

    Takes what `spec.tree.build` takes; verifying this tree is DFlash without a tree.
    """
    top = token_ids[:, : num_nodes - 1, 0]
    tokens = jnp.concatenate([root_token[:, None], top], axis=1)
    padding = num_nodes - tokens.shape[1]
    tokens = jnp.pad(tokens, ((0, 0), (0, padding)))
    return chain(tokens, 1 + jnp.minimum(tree_budget, top.shape[1]))


def step_of(models: Models, shape: Shape, *, mask_slot_0: bool = False) -> StepFunction:
    """Returns the step, as `spec.make_step` makes it, that decodes with a shape.

    Args:
      mask_slot_0: Ablation: the drafter gets MASK in place of the root token.
    """
    builder = spine if shape.name == "chain" else build
    num_nodes = 1 + shape.budget
    if mask_slot_0 and num_nodes > 1:
        return _masked_step(models, num_nodes, builder)
    return make_step(
        models.config,
        models.draft_config,
        models.mesh,
        num_nodes=num_nodes,
        build_tree=builder,
    )


def _masked_step(models: Models, num_nodes: int, builder: TreeBuilder) -> StepFunction:
    """Returns a step whose drafter sees MASK as root, while its tree has the real one.

    The state carries MASK into the step, and the builder puts the token back.
    """

    def step(params, state):
        root = state.root_token

        def build_tree(log_probs, token_ids, _, budget, *, num_nodes):
            return builder(log_probs, token_ids, root, budget, num_nodes=num_nodes)

        inner = make_step(
            models.config,
            models.draft_config,
            models.mesh,
            num_nodes=num_nodes,
            build_tree=build_tree,
        )
        masked = jnp.full_like(root, models.draft_config.mask_token_id)
        state, result = inner(params, state._replace(root_token=masked))
        kept = jnp.where(result.num_tokens > 0, state.root_token, root)
        return state._replace(root_token=kept), result

    return jax.jit(step, donate_argnums=1)
