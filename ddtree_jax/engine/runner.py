"""Owns the device state and the compiled programs that change it.

Everything is compiled ahead of time, once; a compiled program refuses other
shapes, so nothing can compile later. Does not know about requests or threads.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.spec import (
    Assignment,
    Params,
    StepResult,
    abstract_state,
    assign,
    init_state,
    make_prefill,
    make_step,
    release,
)

# Owns no page and may commit nothing, so whatever it runs leaves no trace.
_NOBODY = {
    "pages": [],
    "max_rows": 0,
    "tree_budget": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
}


class Runner:
    """Slots on the device, and what can be done to them.

    Args:
      params: Restored parameters of both models, on `mesh`.
      num_nodes: Tree size of a step, root included.
      prefill_chunks: Chunk sizes to compile; prompts are cut to the largest.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        draft_config: DraftConfig | None,
        mesh: Mesh,
        *,
        slots: int,
        pages_per_slot: int,
        num_pages: int,
        page_size: int,
        num_nodes: int,
        prefill_chunks: tuple[int, ...],
        dtype,
    ):
        self.num_nodes = num_nodes
        self.num_pages = num_pages
        self.pages_per_slot = pages_per_slot
        self._params = params
        abstract = abstract_state(
            config,
            draft_config,
            mesh,
            slots=slots,
            pages_per_slot=pages_per_slot,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
        )
        shardings = jax.tree.map(lambda s: s.sharding, abstract)

        def compiled(function, *arguments):
            jitted = jax.jit(function, donate_argnums=0, out_shardings=shardings)
            return jitted.lower(abstract, *arguments).compile()

        slot = np.int32(0)
        self._assign = compiled(assign, slot, self._assignment(**_NOBODY))
        self._release = compiled(release, slot)
        step = make_step(config, draft_config, mesh, num_nodes=num_nodes)
        self.compiled_step = step.lower(params, abstract).compile()
        prefill = make_prefill(config, draft_config, mesh)
        self._prefill = {
            chunk: prefill.lower(
                params,
                abstract,
                slot,
                jax.ShapeDtypeStruct((chunk,), jnp.int32),
                np.int32(1),
                np.bool_(True),
            ).compile()
            for chunk in sorted(prefill_chunks)
        }
        self.state = init_state(abstract)
        self._warm_up()

    def _warm_up(self) -> None:
        """Runs every program once, so that what cannot run fails here."""
        self.assign(0, **_NOBODY)
        for chunk in self._prefill:
            self.prefill(0, [0] * chunk, is_last=True)
        self.step()
        self.release(0)

    def _assignment(
        self,
        pages: list[int],
        max_rows: int,
        tree_budget: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
    ) -> Assignment:
        # Entries past the last page in use are an id that no page has.
        table = np.full(self.pages_per_slot, self.num_pages, np.int32)
        table[: len(pages)] = pages
        return Assignment(
            page_table=table,
            max_context_len=np.int32(max_rows),
            tree_budget=np.int32(tree_budget),
            temperature=np.float32(temperature),
            top_k=np.int32(top_k),
            top_p=np.float32(top_p),
            min_p=np.float32(min_p),
            seed=np.uint32(seed),
        )

    def assign(self, slot: int, **assignment) -> None:
        """Hands `slot` to a request; see `_assignment` for what it brings."""
        self.state = self._assign(
            self.state, np.int32(slot), self._assignment(**assignment)
        )

    def release(self, slot: int) -> None:
        """Takes `slot` back."""
        self.state = self._release(self.state, np.int32(slot))

    def chunk_for(self, remaining: int) -> int:
        """Returns the chunk size to commit `remaining` prompt tokens with."""
        fitting = [chunk for chunk in self._prefill if chunk >= remaining]
        return min(fitting) if fitting else max(self._prefill)

    def prefill(self, slot: int, tokens: list[int], *, is_last: bool) -> StepResult:
        """Commits prompt tokens; at most the largest chunk of them."""
        chunk = self.chunk_for(len(tokens))
        padded = np.zeros(chunk, np.int32)
        padded[: len(tokens)] = tokens
        self.state, result = self._prefill[chunk](
            self._params,
            self.state,
            np.int32(slot),
            padded,
            np.int32(len(tokens)),
            np.bool_(is_last),
        )
        return jax.device_get(result)

    def step(self) -> StepResult:
        """Runs one step of all slots; returns its result on the host."""
        self.state, result = self.compiled_step(self._params, self.state)
        return jax.device_get(result)
