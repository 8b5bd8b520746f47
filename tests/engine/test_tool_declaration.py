"""Kimi's tool declaration, rule by rule, against text written out by hand."""

import pytest

from ddtree_jax.engine.tool_declaration import (
    InexpressibleError,
    declare_tools,
    sort_keys,
)


def declare(parameters, **function):
    function = {"name": "f", "parameters": parameters, **function}
    return declare_tools([{"type": "function", "function": sort_keys(function)}])


def body_of(parameters, **function):
    head = "# Tools\n\n## functions\nnamespace functions {\n"
    text = declare(parameters, **function)
    assert text.startswith(head)
    assert text.endswith("\n}\n")
    return text[len(head) : -len("\n}\n")]


def field(schema, name="x"):
    """The lines of one required field."""
    parameters = {"type": "object", "properties": {name: schema}, "required": [name]}
    text = body_of(parameters)
    head, tail = "type f = (_: {\n", "\n}) => any;"
    assert text.startswith(head)
    assert text.endswith(tail)
    return text[len(head) : -len(tail)]


def test_whole_declaration_of_two_tools():
    weather = {
        "name": "get_weather",
        "description": "Finds the weather.\n\nNow, not later.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                "city": {"type": "string", "description": "Name of a city"},
                "area": {"type": "integer"},
            },
            "required": ["city"],
        },
    }
    tools = [weather, {"name": "stop"}]
    tools = [{"type": "function", "function": sort_keys(tool)} for tool in tools]
    assert declare_tools(tools) == (
        "# Tools\n"
        "\n"
        "## functions\n"
        "namespace functions {\n"
        "// Finds the weather.\n"
        "\n"
        "// Now, not later.\n"
        "type get_weather = (_: {\n"
        "  // Name of a city\n"
        "  city: string,\n"
        "  area?: number,\n"
        '  // Default: "C"\n'
        '  unit?: "C" | "F"\n'
        "}) => any;\n"
        "type stop = (_: {}) => any;\n"
        "}\n"
    )


def test_required_fields_first_then_by_name():
    schema = {"type": "string"}
    parameters = {
        "properties": dict.fromkeys("dbca", schema),
        "required": ["d", "b", "absent"],
    }
    assert body_of(parameters) == (
        "type f = (_: {\n  b: string,\n  d: string,\n  a?: string,\n  c?: string\n"
        "}) => any;"
    )


@pytest.mark.parametrize(
    ("schema", "lines"),
    [
        ({"type": "integer"}, "  x: number"),
        ({"type": "boolean"}, "  x: boolean"),
        ({"type": "uuid"}, "  x: uuid"),
        ({}, "  x: any"),
        (True, "  x: any"),
        (False, "  x: null"),
        ({"type": ["string", "null"]}, "  x: string | null"),
        ({"type": ["integer", "array", "object"]}, "  x: number | Array<any> | {}"),
        ({"enum": ["a", 1, 2.5, True, None]}, '  x: "a" | 1 | 2.5 | True | None'),
        ({"enum": ["a", None], "type": ["string", "null"]}, '  x: "a" | None'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "  x: string | null"),
        ({"type": "array"}, "  x: Array<any>"),
        ({"type": "array", "items": {"type": "number"}}, "  x: Array<number>"),
        ({"type": "object"}, "  x: {}"),
        (
            {"type": "object", "additionalProperties": False},
            "  x: {\n    [k: string]: never\n  }",
        ),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            "  x: {\n    [k: string]: number\n  }",
        ),
        (
            {
                "type": "object",
                "description": "Outer",
                "properties": {"y": {"type": "string", "description": "Inner"}},
                "additionalProperties": True,
            },
            "  // Outer\n  x: {\n    // Inner\n    y?: string,\n"
            "    [k: string]: any\n  }",
        ),
        (
            {"type": "string", "maxLength": 5, "pattern": "a+", "minLength": 1},
            "  // maxLength: 5, minLength: 1, pattern: a+\n  x: string",
        ),
        (
            {"type": "integer", "maximum": 5, "minLength": 2, "description": "A\n\nB"},
            "  // A\n\n  // B\n  // maximum: 5\n  x: number",
        ),
        (
            {"type": "array", "minItems": 1, "items": {"type": "string"}},
            "  // minItems: 1\n  x: Array<string>",
        ),
        (
            {"type": "array", "items": {"type": "number", "minimum": 0}},
            "  x: Array<\n    // minimum: 0\n    number\n  >",
        ),
        ({"type": "number", "default": 1.5}, "  // Default: 1.5\n  x: number"),
        ({"type": "boolean", "default": False}, "  // Default: False\n  x: boolean"),
        ({"type": "string", "default": "é"}, '  // Default: "é"\n  x: string'),
        ({"type": "array", "default": []}, "  // Default: []\n  x: Array<any>"),
        ({"type": "string", "default": None}, "  x: string"),
    ],
)
def test_field(schema, lines):
    assert field(schema) == lines


def test_fields_are_in_name_order_whatever_order_they_come_in():
    parameters = {"properties": {"b": {}, "a": {}}}
    function = {"name": "f", "parameters": parameters}
    text = declare_tools([{"type": "function", "function": function}])
    assert "{\n  a?: any,\n  b?: any\n}" in text


def test_definitions_come_before_the_function_that_uses_them():
    node = {
        "type": "object",
        "description": "A node",
        "properties": {"next": {"$ref": "#/$defs/Node"}, "color": {"enum": ["r"]}},
    }
    parameters = {
        "$defs": {"Node": node, "Kind": {"enum": ["a", "b"]}},
        "properties": {
            "root": {"$ref": "#/$defs/Node", "description": "Where to begin"}
        },
    }
    assert body_of(parameters, description="Walks.") == (
        'interface Kind "a" | "b"\n'
        "// A node\n"
        'interface Node {\n  color?: "r",\n  next?: Node\n}\n'
        "// Walks.\n"
        "type f = (_: {\n  // Where to begin\n  root?: Node\n}) => any;"
    )


def test_parameters_that_refer_to_themselves_are_an_interface():
    parameters = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "key": {"type": "string"}, "a": {}},
        "required": ["left"],
    }
    assert body_of(parameters) == (
        "interface parameters {\n  a?: any,\n  key?: string,\n  left: parameters\n}\n"
        "type f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"oneOf": [{"type": "string"}]}, "no type, enum, anyOf or"),
        ({"const": 1}, "no type, enum, anyOf or"),
        ("string", "neither an object nor true or false"),
        ({"$ref": "#/$defs/Absent"}, r"a \$ref leads nowhere"),
        ({"$ref": "other.json"}, r"a \$ref leads nowhere"),
        ({"type": ["string", "uuid"]}, "a list of types has an unknown one"),
        ({"enum": ["a"], "type": "integer"}, "an enum value is no integer"),
        ({"enum": ["a"], "type": ["string", "integer"]}, "an enum has several types"),
        ({"enum": "a"}, "enum is no list"),
        ({"type": "string", "description": 7}, "a description is no text"),
        ({"type": "object", "properties": []}, "properties is no dict"),
        ({"type": "object", "additionalProperties": 3}, "neither an object nor"),
    ],
)
def test_what_cannot_be_expressed(schema, reason):
    with pytest.raises(InexpressibleError, match=reason):
        declare({"type": "object", "properties": {"x": schema}})


def test_sort_keys_sorts_at_every_depth_and_keeps_lists():
    value = {"b": [{"d": 1, "c": 2}, 3], "a": None}
    assert list(sort_keys(value)) == ["a", "b"]
    assert list(sort_keys(value)["b"][0]) == ["c", "d"]
    assert sort_keys(value) == value
    assert list(value) == ["b", "a"]
