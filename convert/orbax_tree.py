"""Owns Orbax's part of a checkpoint: its directory, and what it says of the tree."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import orbax.checkpoint as ocp

from convert.durable import sync, sync_tree
from convert.leaf import Leaf

# It stands for all that is written here.
TREE_FILE = "_METADATA"


def write_tree(directory: Path, leaves: Sequence[Leaf], *, nested: bool) -> None:
    """Writes a checkpoint of which the arrays are still missing; durable on return.

    Args:
      nested: Whether "/" in a leaf's path means a subtree, or the tree is flat.
    """
    for leftover in directory.parent.glob(f"{directory.name}*"):
        shutil.rmtree(leftover)
    tree: dict = {}
    for leaf in leaves:
        *parents, name = leaf.path.split("/") if nested else [leaf.path]
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    registry = ocp.type_handlers.create_type_handler_registry((Leaf, _LeafHandler()))
    checkpointer = ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_zarr3=True, type_handler_registry=registry
        )
    )
    with checkpointer:
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(tree))
    # A mark for stores without rename; it states where the directory was.
    (directory / "commit_success.txt").unlink(missing_ok=True)
    sync_tree(directory)
    sync([directory.parent])


class _LeafHandler(ocp.type_handlers.TypeHandler):
    """Says of `Leaf`s that Orbax's own handlers will restore them; writes nothing."""

    def typestr(self) -> str:
        return ocp.type_handlers.NumpyHandler().typestr()

    async def serialize(self, values, infos, args=None):
        return []

    async def metadata(self, infos):
        raise NotImplementedError("restored by Orbax's own handlers")

    async def deserialize(self, infos, args=None):
        raise NotImplementedError("restored by Orbax's own handlers")
