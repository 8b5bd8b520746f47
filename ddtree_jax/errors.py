"""Owns the exception tree. Does not know about arrays, files or HTTP.

    DDTreeError
    ├── ConfigError          config.json or a flag is missing, wrong or unsupported
    ├── CheckpointError      a file or tensor is missing, truncated or not as declared
    │   └── UnsupportedFormatError     a recognised format that is refused by name
    ├── TokenizerError       tokenizer files are unusable
    ├── RequestError         a request cannot be honoured; `param` names the field
    └── EngineError          the engine stopped, or a step reported a fault

Every message is one line that names the file, tensor, field or flag and says
what was expected.
"""


class DDTreeError(Exception):
    """The base of every error that this project raises on purpose."""


class ConfigError(DDTreeError):
    """A configuration is missing, contradictory or unsupported."""


class CheckpointError(DDTreeError):
    """A checkpoint file or tensor is missing, truncated or not as declared."""


class UnsupportedFormatError(CheckpointError):
    """A format that is recognised and refused by name."""


class TokenizerError(DDTreeError):
    """Tokenizer or chat template files are unusable."""


class RequestError(DDTreeError):
    """A request that cannot be honoured; `param` names the offending field."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message)
        self.param = param


class EngineError(DDTreeError):
    """The engine stopped, or a step reported a fault for this request."""
