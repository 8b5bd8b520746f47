"""The tiny checkpoint of the real library, as bytes, and once converted."""

from pathlib import Path

import pytest

from convert.__main__ import main
from tests.convert.support import (
    TINY,
    TINY_DRAFT,
    Raw,
    read_checkpoint,
    read_config,
    write_checkpoint,
)


@pytest.fixture(scope="session")
def tensors() -> dict[str, Raw]:
    return read_checkpoint(TINY)


@pytest.fixture
def config() -> dict:
    return read_config(TINY)


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Path:
    destination = tmp_path_factory.mktemp("converted") / "tiny"
    assert main(["hf", str(TINY), str(destination), "--draft", str(TINY_DRAFT)]) == 0
    return destination


@pytest.fixture
def source(tmp_path, tensors, config) -> Path:
    """The tiny checkpoint with less of its many small tensors, for speed."""
    few = {n: t for n, t in tensors.items() if "vision_tower" not in n}
    return write_checkpoint(tmp_path / "src", few, config)
