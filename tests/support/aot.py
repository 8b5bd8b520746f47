"""Owns compiling for a GPU that is not there, and what its kernels then cost.

What it needs (`requirements/lock-aot.txt`) is in `.venv-aot`, out of JAX's sight:
in `.venv` the CUDA 13 plugin without its libraries would print a traceback at each
start of JAX that is not told to stay on the CPU, and would be taken for the CUDA 12
plugin's own, which `scripts/serve` installs there on a GPU. So it is loaded here, by
hand, when the first test asks for it. Each target has a process of its own: ptxas is
told the architecture of the first program that Mosaic GPU compiled in a process.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit
from jaxlib.mlir import ir
from jaxlib.mosaic.python import mosaic_gpu as mosaic_gpu_dialect

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-aot"
TARGETS = Path(__file__).parent / "targets"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What one Mosaic GPU kernel takes.

    Attributes:
      registers: Of a thread, when the kernel starts.
      spill_stores: Bytes of a thread's registers that are written to memory.
      spill_loads: Likewise, read.
      shared_memory: Bytes of a block.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    shared_memory: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A program for a target: its Mosaic GPU kernels by name, and its HLO."""

    kernels: Mapping[str, Kernel]
    hlo: str


class CompileError(Exception):
    """The program is none for this target; has all that the compilers said."""


def compile_for(target: str, function: Callable, *shapes: tuple) -> Compiled:
    """Returns `function` compiled for a target.

    Args:
      target: Name of a file in `targets`.
      function: Of arrays, as for `jax.jit`; a module's, or a `functools.partial` of it.
      shapes: Of its arguments, each with its dtype.

    Raises:
      CompileError: A compiler refused the program.
    """
    return _process(target).submit(_compile, target, function, *shapes).result()


@functools.cache
def _process(target: str) -> concurrent.futures.ProcessPoolExecutor:
    """Returns the process that compiles for `target`."""
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, mp_context=context)


def _compile(target: str, function: Callable, *shapes: tuple) -> Compiled:
    device, replicated = _device(target)
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=replicated)
        for shape, dtype in shapes
    ]
    limit = artificial_shared_memory_limit(shared_memory_limit(target))
    # The device tells Mosaic GPU what to generate instructions for.
    with jax.default_device(device), limit:
        lowered = jax.jit(function).lower(*arguments)
        shared_memory = _shared_memory(lowered)
        with _environment(), _captured() as log:
            try:
                compiled = lowered.compile()
            except jax.errors.JaxRuntimeError as error:
                raise CompileError(f"{error}\n{log()}") from error
            reports = _reports(log())
    if reports.keys() != shared_memory.keys():
        raise CompileError(
            f"ptxas reported on {sorted(reports)}; expected {sorted(shared_memory)}"
        )
    kernels = {
        name.removesuffix("_mosaic_gpu_kernel"): Kernel(
            **report, shared_memory=shared_memory[name]
        )
        for name, report in reports.items()
    }
    return Compiled(kernels=kernels, hlo=compiled.as_text() or "")


def shared_memory_limit(target: str) -> int:
    """Returns how many bytes a block of this target may have."""
    [limit] = re.findall(r"shared_memory_per_block_optin: (\d+)", _text(target))
    return int(limit)


def _text(target: str) -> str:
    return (TARGETS / f"{target}.txtpb").read_text()


@functools.cache
def _device(target: str):
    """Returns the one device of a target, and the sharding that is on it."""
    _load_plugin()
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=target,
        target_config=_text(target),
        topology="1x1x1",
    )
    mesh = topologies.make_mesh(topology, (1,), ("all",))
    whole = jax.sharding.PartitionSpec()
    return topology.devices[0], jax.sharding.NamedSharding(mesh, whole)


@functools.cache
def _load_plugin() -> None:
    """Makes the platform "cuda" known; a plugin that JAX itself found serves too."""
    if not (TOOLS / "nvidia").is_dir():
        raise FileNotFoundError(f"{TOOLS} is missing: scripts/test installs it")
    jax.devices()
    if any(name.startswith("jax_plugins.") for name in sys.modules):
        return
    sys.path.insert(0, str(TOOLS))
    try:
        importlib.import_module("jax_plugins.xla_cuda13").initialize()
    finally:
        sys.path.remove(str(TOOLS))


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Sets what XLA and Mosaic GPU look for when they compile."""
    changes = {
        # One that is installed would come before ours, and spill otherwise.
        "PATH": f"{TOOLS / 'nvidia/cu13/bin'}{os.pathsep}{os.environ['PATH']}",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_RUNTIME_LIB_PATH": str(
            TOOLS / "jax_cuda13_plugin/libmosaic_gpu_runtime.so"
        ),
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _captured() -> Iterator[Callable[[], str]]:
    """Catches what native code prints; gives a function that returns it so far."""
    flush = ctypes.CDLL(None).fflush
    saved = [os.dup(descriptor) for descriptor in (1, 2)]
    with tempfile.TemporaryFile() as file:

        def log() -> str:
            flush(None)
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            yield log
        finally:
            flush(None)
            for descriptor, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def _reports(log: str) -> dict[str, dict[str, int]]:
    """Returns what ptxas says of each kernel, by the name of its entry function."""
    pattern = (
        r"Compiling entry function '(\w+)' for '\w+'\n.*\n"
        r".* (\d+) bytes spill stores, (\d+) bytes spill loads\n"
        r".* Used (\d+) registers"
    )
    return {
        name: {
            "registers": int(registers),
            "spill_stores": int(stores),
            "spill_loads": int(loads),
        }
        for name, stores, loads, registers in re.findall(pattern, log)
    }


def _shared_memory(lowered) -> dict[str, int]:
    """Returns the bytes that each kernel is launched with, by its entry function."""
    module = lowered.compiler_ir()
    sizes = {}
    with module.context as context:
        mosaic_gpu_dialect.register_dialect(context)
        # The serialised form's own dialect has no definition, only a name.
        context.allow_unregistered_dialects = True
        for call in _operations(module.operation, "stablehlo.custom_call"):
            if call.attributes["call_target_name"].value != "mosaic_gpu_v2":
                continue
            kernel = call.attributes["mhlo.backend_config"]["module"].value_bytes
            inner = ir.Module.parse(kernel).operation
            [launch] = _operations(inner, "stable_mosaic_gpu.gpu.launch")
            size = launch.operands[len(launch.operands) - 1].owner
            host = launch.parent
            name = f"{host.attributes['sym_name'].value}_kernel"
            sizes[name] = size.attributes["value"].value
    return sizes


def _operations(operation, name: str) -> Iterator:
    """Yields the operations of this name inside another, but none inside those."""
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == name:
                    yield inner.operation
                else:
                    yield from _operations(inner, name)
