"""Owns how tools are written for Kimi: as a TypeScript namespace.

Does not know about templates or messages.

    # Tools

    ## functions
    namespace functions {
    // Finds the weather.
    type get_weather = (_: {
      // Name of a city
      city: string,
      unit?: "C" | "F"
    }) => any;
    }

K2.5 and later were trained on this form, to the byte, so this follows it where
TypeScript itself would ask for something else. JSON Schema keywords that the form
has no place for (`format`, `title`, `oneOf` beside a `type`, …) are left out of it;
a schema with no `type`, `enum`, `anyOf` or `$ref` cannot be expressed.
"""

import json
from typing import Any

_INDENT = "  "
_SCALAR_LIMITS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
}
_IN_UNION = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_CLASSES = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


class InexpressibleError(Exception):
    """A schema that the form cannot write; the message quotes none of it."""


def declare_tools(tools: list[dict[str, Any]]) -> str:
    """Returns the declaration of OpenAI-style tools.

    Args:
      tools: In the order to declare them. The keys of all objects are sorted (see
        `sort_keys`), as that decides the order of definitions.

    Raises:
      InexpressibleError: The caller then declares the tools as JSON.
    """
    functions = "\n".join(_declare_function(tool["function"]) for tool in tools)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"


def sort_keys(value: Any) -> Any:
    """Returns a copy of a JSON value with the keys of every object sorted."""
    if isinstance(value, dict):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [sort_keys(item) for item in value]
    return value


def _declare_function(function: dict[str, Any]) -> str:
    writer = _SchemaWriter()
    parameters = function.get("parameters") or {}
    written = writer.write_object(parameters, "")
    lines = []
    if writer.refers_to_root:
        # An interface of its own, so that it can name itself; fields in name order.
        fields = ",\n".join(text for _, text in writer.write_fields(parameters, ""))
        body = f"\n{fields}\n" if fields else ""
        lines.append(f"interface parameters {{{body}}}")
        written = "parameters"
    for name, schema in list(writer.definitions.items()):
        definition = writer.write(schema, "")
        if not isinstance(schema, dict):
            raise InexpressibleError("a definition is no object")
        lines += _comment(schema.get("description"), "")
        lines.append(f"interface {name} {definition}")
    lines += _comment(function.get("description"), "")
    lines.append(f"type {function['name']} = (_: {written}) => any;")
    return "\n".join(lines)


class _SchemaWriter:
    """Writes the schemas of one function.

    Attributes:
      definitions: Every `$defs` entry met so far, in the order met.
      refers_to_root: Whether a `{"$ref": "#"}` was met.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.refers_to_root = False

    def write(self, schema: Any, indent: str) -> str:
        """Returns the type that a schema describes; later lines start at `indent`."""
        if isinstance(schema, bool) or schema == {}:
            return "null" if schema is False else "any"
        if not isinstance(schema, dict):
            raise InexpressibleError("a schema is neither an object nor true or false")
        if "$ref" in schema:
            return self._write_reference(schema["$ref"])
        if "anyOf" in schema:
            choices = _expect(schema, "anyOf", list)
            return " | ".join(self.write(choice, indent) for choice in choices)
        if "enum" in schema:
            return _write_enum(schema)
        kind = schema.get("type")
        if isinstance(kind, list):
            return _write_union(kind)
        if kind == "object":
            return self.write_object(schema, indent)
        if kind == "array":
            return self._write_array(schema, indent)
        if isinstance(kind, str):
            return "number" if kind == "integer" else kind
        raise InexpressibleError("a schema has no type, enum, anyOf or $ref")

    def write_object(self, schema: dict[str, Any], indent: str) -> str:
        """Returns an object type: required fields first, each part in name order."""
        inner = indent + _INDENT
        if "$defs" in schema:
            self.definitions.update(_expect(schema, "$defs", dict))
        others = []
        if (more := schema.get("additionalProperties")) is not None:
            kind = "never" if more is False else self.write(more, inner)
            others.append(f"{inner}[k: string]: {kind}")
        fields = self.write_fields(schema, indent)
        lines = [text for required, text in fields if required]
        lines += [text for required, text in fields if not required]
        body = ",\n".join(lines + others)
        return f"{{\n{body}\n{indent}}}" if body else "{}"

    def write_fields(
        self, schema: dict[str, Any], indent: str
    ) -> list[tuple[bool, str]]:
        """Returns (is required, its lines) for every property, in name order."""
        inner = indent + _INDENT
        required = _expect(schema, "required", list) if "required" in schema else []
        properties = (
            _expect(schema, "properties", dict) if "properties" in schema else {}
        )
        fields = []
        for name in sorted(properties):
            lines = _comments(properties[name], inner)
            mark = "" if name in required else "?"
            kind = self.write(properties[name], inner)
            lines += _default(properties[name], inner)
            lines.append(f"{inner}{name}{mark}: {kind}")
            fields.append((name in required, "\n".join(lines)))
        return fields

    def _write_array(self, schema: dict[str, Any], indent: str) -> str:
        items = schema.get("items") or {}
        comments = _comments(items, indent + _INDENT)
        if not comments:
            return f"Array<{self.write(items, indent)}>"
        inner = indent + _INDENT
        lines = ["Array<", *comments, inner + self.write(items, inner), f"{indent}>"]
        return "\n".join(lines)

    def _write_reference(self, reference: Any) -> str:
        if reference == "#":
            self.refers_to_root = True
            return "parameters"
        name = str(reference).rsplit("/", 1)[-1]
        definition = self.definitions.get(name)
        if not str(reference).startswith("#/$defs/") or definition is None:
            raise InexpressibleError("a $ref leads nowhere")
        if not isinstance(definition, dict):
            raise InexpressibleError("a definition is no object")
        return name


def _write_enum(schema: dict[str, Any]) -> str:
    values = _expect(schema, "enum", list)
    if "type" in schema:
        kind = schema["type"]
        kinds = kind if isinstance(kind, list) else [kind]
        named = [k for k in kinds if k != "null"] or ["null"]
        if len(named) > 1 or len(kinds) > 2:
            raise InexpressibleError("an enum has several types")
        expected = _ENUM_CLASSES.get(named[0], object)
        if not all(v is None or isinstance(v, expected) for v in values):
            raise InexpressibleError(f"an enum value is no {named[0]}")
    return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in values)


def _write_union(kinds: list[Any]) -> str:
    if not all(isinstance(kind, str) and kind in _IN_UNION for kind in kinds):
        raise InexpressibleError("a list of types has an unknown one")
    return " | ".join(_IN_UNION[kind] for kind in kinds)


def _comments(schema: Any, indent: str) -> list[str]:
    """Returns the comment lines above a field: description, then limits."""
    if not isinstance(schema, dict):
        return []
    lines = _comment(schema.get("description"), indent)
    limits: tuple[str, ...] = ()
    if not {"$ref", "anyOf", "enum"} & schema.keys():
        kind = schema.get("type")
        limits = ("maxItems", "minItems") if kind == "array" else ()
        if isinstance(kind, str):
            limits += _SCALAR_LIMITS.get(kind, ())
    if given := [f"{key}: {schema[key]}" for key in sorted(limits) if key in schema]:
        lines.append(f"{indent}// {', '.join(given)}")
    return lines


def _default(schema: Any, indent: str) -> list[str]:
    default = schema.get("default") if isinstance(schema, dict) else None
    if default is None:
        return []
    plain = isinstance(default, int | float)  # Booleans too: written as in Python.
    text = repr(default) if plain else json.dumps(default, ensure_ascii=False)
    return [f"{indent}// Default: {text}"]


def _comment(text: Any, indent: str) -> list[str]:
    if not text:
        return []
    if not isinstance(text, str):
        raise InexpressibleError("a description is no text")
    return [f"{indent}// {line}" if line else "" for line in text.split("\n")]


def _expect(schema: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(schema[key], kind):
        raise InexpressibleError(f"{key} is no {kind.__name__}")
    return schema[key]
