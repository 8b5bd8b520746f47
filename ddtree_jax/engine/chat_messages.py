"""Owns which chat messages and tools are accepted, and their one normal form.

Does not know about templates or tokenizers. What cannot be honoured is refused by
the name of its field; in the normal form equal things look equal: content is
always one string, and absent fields are absent, never None.
"""

import re
from typing import Any

from ddtree_jax.errors import RequestError

_FIELDS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content"},
    "tool": {"role", "content", "name", "tool_call_id"},
}
_MAX_DEPTH = 64  # Of nested JSON; templates and schemas are walked recursively.
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_KIMI_ID = re.compile(r"functions\.[A-Za-z0-9_.-]+:\d+")


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages in normal form.

    Content is a string, a list of text parts or nothing; the last two become the
    joined text and "". The role "developer" is OpenAI's newer word for "system"
    and becomes that. `reasoning` is another word for `reasoning_content`.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            "messages: expected a list of at least one message", param="messages"
        )
    _check_json(messages, "messages")
    return [_check_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def check_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Returns the tools in normal form; none if there are none."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError("tools: expected a list", param="tools")
    _check_json(tools, "tools")
    return [_check_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def with_kimi_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with tool call ids as Kimi writes them.

    Kimi was trained on `functions.NAME:IDX`, where IDX counts the calls of the
    whole conversation. Ids of that form are kept, whatever their number; others
    (`call_…` of another model or client) get the next free number, in the call and
    in the results that answer it. A result that answers no call keeps its id.
    """
    calls = [call for m in messages for call in m.get("tool_calls", ())]
    taken = {call["id"] for call in calls}
    renamed: dict[str, str] = {}
    renewed, count = [], 0
    for message in messages:
        message = dict(message)
        if "tool_calls" in message:
            message["tool_calls"] = [dict(call) for call in message["tool_calls"]]
        for call in message.get("tool_calls", ()):
            if not _KIMI_ID.fullmatch(call["id"]):
                name = call["function"]["name"]
                while (new := f"functions.{name}:{count}") in taken:
                    count += 1
                renamed[call["id"]] = call["id"] = new
            count += 1
        if "tool_call_id" in message:
            old = message["tool_call_id"]
            message["tool_call_id"] = renamed.get(old, old)
        renewed.append(message)
    return renewed


def _check_message(message: Any, where: str) -> dict[str, Any]:
    message = _present(message, where)
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in _FIELDS:
        raise _refusal(
            f"{where}.role", f"{role!r}; expected one of {', '.join(_FIELDS)}"
        )
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    if unknown := sorted(message.keys() - _FIELDS[role]):
        raise _refusal(
            f"{where}.{unknown[0]}", f"not a field of a message of role {role}"
        )
    checked = {"role": role, "content": _content(message.get("content"), where)}
    for key in ("name", "reasoning_content", "tool_call_id"):
        if key in message:
            checked[key] = _string(message[key], f"{where}.{key}")
    if role == "tool" and "tool_call_id" not in message:
        raise _refusal(f"{where}.tool_call_id", "missing; expected the id of the call")
    if "tool_calls" in message:
        checked["tool_calls"] = [
            _check_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(
                _expect(message["tool_calls"], list, f"{where}.tool_calls")
            )
        ]
    return checked


def _content(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(_expect(content, list, f"{where}.content")):
        place = f"{where}.content[{i}]"
        part = _expect(part, dict, place)
        if part.get("type") != "text":
            raise _refusal(
                f"{place}.type", f"{part.get('type')!r}; this engine reads text only"
            )
        if unknown := sorted(part.keys() - {"type", "text"}):
            raise _refusal(f"{place}.{unknown[0]}", "not a field of a text part")
        texts.append(_string(part.get("text"), f"{place}.text"))
    return "".join(texts)


def _check_call(call: Any, where: str) -> dict[str, Any]:
    call = _present(call, where)
    call.pop("index", None)  # Streamed calls carry it; their order says the same.
    _check_keys(call, {"id", "type", "function"}, where)
    function = _present(call.get("function"), f"{where}.function")
    _check_keys(function, {"name", "arguments"}, f"{where}.function")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str | dict):
        raise _refusal(f"{where}.function.arguments", "expected a string or an object")
    return {
        "id": _string(call.get("id"), f"{where}.id"),
        "type": "function",
        "function": {
            "name": _name(function.get("name"), f"{where}.function.name"),
            "arguments": arguments,
        },
    }


def _check_tool(tool: Any, where: str) -> dict[str, Any]:
    tool = _present(tool, where)
    _check_keys(tool, {"type", "function"}, where)
    function = _present(tool.get("function"), f"{where}.function")
    known = {"name", "description", "parameters", "strict"}
    if unknown := sorted(function.keys() - known):
        raise _refusal(f"{where}.function.{unknown[0]}", "not a field of a function")
    _name(function.get("name"), f"{where}.function.name")
    if "description" in function:
        _string(function["description"], f"{where}.function.description")
    if "parameters" in function:
        _expect(function["parameters"], dict, f"{where}.function.parameters")
    return {"type": "function", "function": function}


def _check_keys(value: dict[str, Any], known: set[str], where: str) -> None:
    if "type" in known and value.get("type", "function") != "function":
        raise _refusal(f"{where}.type", f"{value['type']!r}; expected 'function'")
    if unknown := sorted(value.keys() - known):
        raise _refusal(f"{where}.{unknown[0]}", f"expected {', '.join(sorted(known))}")


def _check_json(value: Any, where: str) -> None:
    """Refuses what would break the recursion or the text further down."""
    level, depth = [value], 0
    while level:
        if depth > _MAX_DEPTH:
            raise _refusal(where, f"nested deeper than {_MAX_DEPTH} levels")
        if any(isinstance(v, str) and _SURROGATE.search(v) for v in level):
            raise _refusal(where, "a text holds a lone surrogate; expected Unicode")
        dicts = [item for item in level if isinstance(item, dict)]
        lists = [item for item in level if isinstance(item, list)]
        level = [v for d in dicts for pair in d.items() for v in pair]
        level += [v for items in lists for v in items]
        depth += 1


def _present(value: Any, where: str) -> dict[str, Any]:
    """Returns the fields that are given; clients send None or [] for the others."""
    given = _expect(value, dict, where).items()
    return {key: v for key, v in given if v is not None and v != []}


def _name(value: Any, where: str) -> str:
    if not _NAME.fullmatch(_string(value, where)):
        raise _refusal(where, f"{value!r}; expected letters, digits, '_', '-', '.'")
    return value


def _string(value: Any, where: str) -> str:
    return _expect(value, str, where)


def _expect(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        expected = {dict: "an object", list: "a list", str: "a string"}[kind]
        raise _refusal(where, f"expected {expected}")
    return value


def _refusal(where: str, why: str) -> RequestError:
    return RequestError(f"{where}: {why}", param=re.split(r"[.\[]", where)[0])
