"""Owns chat messages → prompt. Does not know about HTTP, sampling or the model.

The template is the checkpoint's own Jinja file, rendered by MiniJinja: no Python is
reachable from it, and its fuel bounds both time and memory. What clients may send
is in `chat_messages.py`, how Kimi wants tools written in `tool_declaration.py`.

Text of a client never becomes a special token, wherever a template puts it: see
`Tokenizer.shield`.
"""

import json
import logging
from pathlib import Path
from typing import Any

import minijinja

from ddtree_jax.engine import chat_messages, tool_declaration
from ddtree_jax.engine.token_codec import Tokenizer
from ddtree_jax.engine.tokenizer import load_tokenizer, read_json
from ddtree_jax.errors import RequestError, TokenizerError

_log = logging.getLogger(__name__)

# Spent on instructions and on the text they make. Kimi's template takes less than a
# million for thousands of turns or megabytes of text; a runaway one is stopped in
# half a second and a few hundred megabytes.
_FUEL = 5_000_000
_KWARGS = ("enable_thinking", "preserve_thinking", "thinking")
# Two names of one switch; a template knows one of them.
_ALIASES = {"enable_thinking": "thinking", "thinking": "enable_thinking"}
_MARKER_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """Renders chat messages into the prompt that the model was trained on.

    Args:
      source: The template.
      tokenizer: Encodes the prompt.
      constants: Further names the template may use, such as `bos_token`.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, constants: dict[str, str]):
        self._tokenizer = tokenizer
        self._constants = constants
        # As Hugging Face sets up Jinja, on which templates rely for their blanks.
        self._environment = minijinja.Environment(
            debug=False, fuel=_FUEL, trim_blocks=True, lstrip_blocks=True
        )
        self._environment.add_filter("tojson", _tojson)
        self._environment.add_global("raise_exception", _raise_exception)
        try:
            self._environment.add_template("chat", source)
            self._names = self._environment.undeclared_variables_in_str(source)
        except minijinja.TemplateError as error:
            raise TokenizerError(f"chat template: {_one_line(error)}") from None
        self._is_kimi = "<|tool_call_argument_begin|>" in source

    @classmethod
    def load(
        cls, directory: Path, *, tokenizer: Tokenizer | None = None
    ) -> "ChatTemplate | None":
        """Returns the template of a checkpoint directory, None if there is none.

        `chat_template.jinja` wins over the `chat_template` of
        `tokenizer_config.json`, as in Hugging Face's library.
        """
        path = Path(directory) / "tokenizer_config.json"
        config = read_json(path)
        source = config.get("chat_template")
        if isinstance(source, list):  # Several, by name.
            source = {entry["name"]: entry["template"] for entry in source}.get(
                "default"
            )
            if source is None:
                raise TokenizerError(f"{path}: chat_template has no 'default'")
        if (file := Path(directory) / "chat_template.jinja").is_file():
            source = file.read_text(encoding="utf-8")
        if source is None:
            return None
        if not isinstance(source, str):
            raise TokenizerError(f"{path}: chat_template: expected a string")
        markers = {name: config.get(name) for name in _MARKER_NAMES}
        texts = {
            name: marker["content"] if isinstance(marker, dict) else marker
            for name, marker in markers.items()
            if marker is not None
        }
        return cls(source, tokenizer or load_tokenizer(directory), texts)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, object] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns the prompt as text, byte for byte what the template says.

        Args:
          messages: OpenAI's form; see `chat_messages.check_messages`.
          tools: OpenAI's form.
          kwargs: `thinking` (or `enable_thinking`) and `preserve_thinking`, each
            only if the template knows it.
          add_generation_prompt: Ends the prompt with the head of the answer.
        """
        context = self._context(messages, tools, kwargs, add_generation_prompt)
        return self._render(context)

    def encode(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        kwargs: dict[str, object] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Returns the prompt as ids; arguments as in `render`.

        Special tokens of the template become ids, those in messages and tools
        remain text. Without any of the latter, the ids are those of the rendered
        text as a whole.
        """
        context = self._context(messages, tools, kwargs, add_generation_prompt)
        # Roles are checked words, and templates may well build markers of them.
        context["messages"] = [
            self._shielded(message, "messages") | {"role": message["role"]}
            for message in context["messages"]
        ]
        for key in context.keys() & {"tools", "tools_ts_str"}:
            context[key] = self._shielded(context[key], "tools")
        return self._tokenizer.encode(self._render(context), allow_special=True)

    def _context(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, object] | None,
        add_generation_prompt: bool,
    ) -> dict[str, Any]:
        messages = chat_messages.check_messages(messages)
        checked = chat_messages.check_tools(tools)
        if checked and not self._names & {"tools", "tools_ts_str"}:
            raise RequestError(
                "tools: the chat template of this model has no tools", param="tools"
            )
        context = {**self._constants, **self._check_kwargs(kwargs or {})}
        if self._is_kimi:
            messages = chat_messages.with_kimi_ids(messages)
            checked = tool_declaration.sort_keys(checked)
            if declaration := _declare(checked):
                context["tools_ts_str"] = declaration
        return {
            **context,
            "messages": messages,
            "tools": checked or None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _check_kwargs(self, kwargs: dict[str, object]) -> dict[str, bool]:
        known = [name for name in _KWARGS if name in self._names]
        checked: dict[str, bool] = {}
        for name, value in kwargs.items():
            target = name
            if name in _KWARGS and name not in known:
                target = _ALIASES.get(name, name)
            if target not in known:
                raise RequestError(
                    f"chat_template_kwargs: {name}: expected one of "
                    f"{', '.join(known) or 'none'}, which this template knows",
                    param="chat_template_kwargs",
                )
            if not isinstance(value, bool):
                raise RequestError(
                    f"chat_template_kwargs: {name}: expected true or false",
                    param="chat_template_kwargs",
                )
            if checked.setdefault(target, value) != value:
                raise RequestError(
                    f"chat_template_kwargs: {name} contradicts {_ALIASES[name]}",
                    param="chat_template_kwargs",
                )
        return checked

    def _render(self, context: dict[str, Any]) -> str:
        try:
            return self._environment.render_template("chat", **context)
        except (minijinja.TemplateError, UnicodeEncodeError) as error:
            raise RequestError(
                f"messages: the chat template failed: {_one_line(error)}",
                param="messages",
            ) from None

    def _shielded(self, value: Any, param: str) -> Any:
        """Returns a copy of a JSON value with every string shielded."""
        if isinstance(value, str):
            try:
                return self._tokenizer.shield(value)
            except RequestError as error:
                raise RequestError(f"{param}: {error}", param=param) from None
        if isinstance(value, list):
            return [self._shielded(item, param) for item in value]
        if isinstance(value, dict):
            return {
                self._shielded(key, param): self._shielded(item, param)
                for key, item in value.items()
            }
        return value


def require_template(template: ChatTemplate | None) -> ChatTemplate:
    """Returns the template; a request to chat with a model without one is refused."""
    if template is None:
        raise RequestError(
            "messages: this model has no chat template (chat_template.jinja, or "
            "chat_template in tokenizer_config.json); expected a text completion",
            param="messages",
        )
    return template


def _declare(tools: list[dict[str, Any]]) -> str | None:
    """Returns Kimi's declaration; None has the template write JSON, as for K2.5."""
    if not tools:
        return None
    try:
        return tool_declaration.declare_tools(tools)
    except tool_declaration.InexpressibleError as error:
        _log.warning("tools are declared as JSON: %s", error)
        return None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as Hugging Face's filter of this name: no HTML escapes."""
    if ensure_ascii:
        _raise_exception("it asks for tojson(ensure_ascii=true), which is not here")
    return json.dumps(
        value,
        ensure_ascii=False,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise RequestError(f"messages: the chat template says: {message}", param="messages")


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0]
