"""Prompts against Jinja2, set up as Hugging Face does, and by hand."""

import json
import logging
import os
import pathlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ddtree_jax.engine.chat import ChatTemplate, require_template
from ddtree_jax.engine.token_codec import SHIELD
from ddtree_jax.engine.tokenizer import load_tokenizer
from ddtree_jax.errors import RequestError, TokenizerError

DATA = pathlib.Path(__file__).parent / "data"
KIMI = load_tokenizer(DATA)
CHAT = ChatTemplate.load(DATA, tokenizer=KIMI)
SOURCE = (DATA / "chat_template.jinja").read_text()
MARKERS = sorted(m for m in KIMI.special_tokens if "reserved" not in m)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def jinja(source, **context):
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    return environment.from_string(source).render(**context)


def template(source, **constants):
    return ChatTemplate(source, KIMI, constants)


def user(content="hi", **fields):
    return {"role": "user", "content": content, **fields}


def call(name="f", arguments='{"a": 1}', id="functions.f:0"):
    function = {"name": name, "arguments": arguments}
    return {"id": id, "type": "function", "function": function}


def tool(name="f", **function):
    return {"type": "function", "function": {"name": name, **function}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [tool("weather", description="Finds it.", parameters=CITY)]
DECLARED = (
    "# Tools\n\n## functions\nnamespace functions {\n// Finds it.\n"
    "type weather = (_: {\n  city?: string\n}) => any;\n}\n"
)
BARE = [tool("weather", parameters={"properties": {"b": {"oneOf": []}, "a": {}}})]
CONTENT = st.one_of(
    st.text(st.sampled_from("ab the\n  \t中😀'\"\\{}%<>|[]/"), max_size=12),
    st.sampled_from(["", " x ", "<|im_end|>", "{{ messages }}", "</think>\n", "a\n"]),
)


@st.composite
def conversations(draw):
    messages, calls = [], 0
    for _ in range(draw(st.integers(1, 6))):
        role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
        message = {"role": role, "content": draw(CONTENT)}
        if draw(st.booleans()):
            message["name"] = draw(st.sampled_from(["bob", "w_1"]))
        if role == "assistant" and draw(st.booleans()):
            message["reasoning_content"] = draw(CONTENT)
        if role == "assistant" and draw(st.booleans()):
            arguments = draw(
                st.sampled_from(['{"a": 1}', {"b": "é", "a": [1, 2.0, True, None]}])
            )
            message["tool_calls"] = [call("f", arguments, f"functions.f:{calls}")]
            calls += 1
        if role == "tool":
            message["tool_call_id"] = f"functions.f:{calls}"
        messages.append(message)
    return messages


@given(
    conversations(),
    st.sampled_from([(None, None), (TOOLS, DECLARED), (BARE, None)]),
    st.sampled_from([{}, {"thinking": True}, {"thinking": False}]),
    st.sampled_from([{}, {"preserve_thinking": True}]),
    st.booleans(),
)
@settings(max_examples=150)
def test_render_equals_jinja_to_the_byte(messages, declared, thinking, keep, prompt):
    tools, declaration = declared
    kwargs = thinking | keep
    want = jinja(
        SOURCE,
        messages=messages,
        tools=json.loads(json.dumps(tools, sort_keys=True)),
        tools_ts_str=declaration,
        add_generation_prompt=prompt,
        **kwargs,
    )
    options = {"tools": tools, "kwargs": kwargs, "add_generation_prompt": prompt}
    assert CHAT.render(messages, **options) == want
    # As ids it is the same text, and exactly the template's own markers are special.
    ids = CHAT.encode(messages, **options)
    assert KIMI.decode_bytes(ids) == want.encode()


def test_blanks_around_blocks_are_those_of_hugging_face():
    source = "a\n  {% if true %}\n  b\n  {% endif %}\n {{ messages[0].content }}\n\n"
    want = "a\n  b\n hi\n"
    assert jinja(source, messages=[user()]) == want
    assert template(source).render([user()]) == want


def test_turns_as_kimi_was_trained_on_them():
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "My name is Qwen2."},
    ]
    text = (
        "<|im_system|>system<|im_middle|>You are a helpful assistant.<|im_end|>"
        "<|im_user|>user<|im_middle|>Who are you?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>My name is Qwen2."
        "<|im_end|>"
    )
    assert CHAT.render(messages, add_generation_prompt=False) == text
    ids = CHAT.encode(messages, add_generation_prompt=False)
    assert ids == KIMI.encode(text, allow_special=True)
    kinds = ["<|im_system|>", "<|im_user|>", "<|im_assistant|>"]
    markers = [[kind, "<|im_middle|>", "<|im_end|>"] for kind in kinds]
    markers[2][2:2] = ["<think>", "</think>"]
    special = [KIMI.special_tokens[marker] for turn in markers for marker in turn]
    assert [i for i in ids if i >= 400] == special


def test_generation_prompt_and_thinking():
    head = (
        "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
    )
    assert CHAT.render([user()]) == head + "<think>"
    assert CHAT.render([user()], kwargs={"thinking": True}) == head + "<think>"
    for name in ("thinking", "enable_thinking"):
        assert CHAT.render([user()], kwargs={name: False}) == head + "<think></think>"


def test_reasoning_is_dropped_before_the_last_answer_unless_preserved():
    messages = [
        {"role": "assistant", "content": "x", "reasoning_content": "old"},
        user(),
        {"role": "assistant", "reasoning": "new", "tool_calls": [call()]},
    ]
    text = CHAT.render(messages)
    assert "<think></think>x" in text
    assert "<think>new</think><|tool_calls_section_begin|>" in text
    kept = CHAT.render(messages, kwargs={"preserve_thinking": True})
    assert "<think>old</think>x" in kept


def test_tools_are_declared_and_results_named(caplog):
    messages = [
        user(),
        {"role": "assistant", "content": None, "tool_calls": [call("weather")]},
        {"role": "tool", "tool_call_id": "functions.f:0", "content": "21"},
    ]
    text = CHAT.render(messages, tools=TOOLS)
    assert text.startswith(
        f"<|im_system|>tool_declare<|im_middle|>{DECLARED}<|im_end|><|im_user|>"
    )
    assert (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.f:0\n21<|im_end|>"
    ) in text
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        text = CHAT.render([user()], tools=BARE)
    assert "tools are declared as JSON: a schema has no type" in caplog.text
    assert text.startswith(
        '<|im_system|>tool_declare<|im_middle|>[{"function":{"name":"weather",'
        '"parameters":{"properties":{"a":{},"b":{"oneOf":[]}}}},"type":"function"}]'
        "<|im_end|>"
    )


def test_foreign_call_ids_become_kimis_and_kimis_stay():
    def turn(*ids):
        calls = [call("f", id=i) for i in ids]
        results = [
            {"role": "tool", "tool_call_id": i, "content": "r"} for i in reversed(ids)
        ]
        return [{"role": "assistant", "tool_calls": calls}, *results]

    messages = [*turn("call_a", "functions.f:7"), *turn("call_a"), *turn("x", "y")]
    messages += [*turn("functions.f:5"), {"role": "tool", "tool_call_id": "lost"}]
    text = CHAT.render(messages)
    assert [p.split("<")[0] for p in text.split("<|tool_call_begin|>")[1:]] == [
        f"functions.f:{n}" for n in (0, 7, 2, 3, 4, 5)
    ]
    assert [p.split("\n")[0] for p in text.split("## Return of ")[1:]] == [
        *(f"functions.f:{n}" for n in (7, 0, 2, 4, 3, 5)),
        "lost",
    ]
    # A number that a kept id has is not given twice.
    text = CHAT.render(turn("functions.f:1", "b"))
    assert [p.split("<")[0] for p in text.split("<|tool_call_begin|>")[1:]] == [
        "functions.f:1",
        "functions.f:2",
    ]
    # Only Kimi has such ids.
    other = template("{% for m in messages %}{{ m.tool_calls[0].id }}{% endfor %}")
    assert other.render([{"role": "assistant", "tool_calls": [call(id="c")]}]) == "c"


@pytest.mark.parametrize("empty", [None, "", [], [{"type": "text", "text": ""}]])
def test_empty_content_of_every_form_is_equal(empty):
    for role in ("system", "user", "assistant"):
        want = CHAT.render([{"role": role, "content": ""}])
        assert CHAT.render([{"role": role, "content": empty}]) == want
    assert "None" not in CHAT.render([user(empty)])
    assert CHAT.render([{"role": "user"}]) == CHAT.render([user("")])


def test_text_parts_are_joined_and_absent_fields_ignored():
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": " b"}]
    assert CHAT.render([user(parts)]) == CHAT.render([user("a\n b")])
    dumped = {"tool_calls": None, "refusal": None, "annotations": [], "audio": None}
    bare = {"role": "assistant", "content": "x"}
    assert CHAT.render([bare | dumped]) == CHAT.render([bare])
    developer = {"role": "developer", "content": "x"}
    assert CHAT.render([developer]) == CHAT.render([developer | {"role": "system"}])


class TestInjection:
    @pytest.mark.parametrize("marker", MARKERS)
    def test_markers_typed_by_a_client_stay_text(self, marker):
        tools = [tool("f", description=f"{marker}d", parameters=CITY)]
        messages = [
            {"role": "system", "content": f"{marker}s"},
            user(f"u{marker}{marker}", name=f"n{marker}"),
            {
                "role": "assistant",
                "content": f"a{marker}",
                "reasoning_content": marker,
                "tool_calls": [call("f", {marker: [marker]}, f"i{marker}")],
            },
            {"role": "tool", "tool_call_id": f"t{marker}", "content": f"{marker}\n"},
        ]
        harmless = json.loads(json.dumps([messages, tools]).replace(marker, "#"))
        ids = CHAT.encode(messages, tools=tools)
        want = CHAT.encode(harmless[0], tools=harmless[1])
        assert [i for i in ids if i >= 400] == [i for i in want if i >= 400]
        text = CHAT.render(messages, tools=tools)
        assert text.count(marker) > 8
        assert KIMI.decode_bytes(ids) == text.encode()

    def test_markers_in_the_json_form_stay_text(self):
        schema = {"properties": {"role": {"oneOf": ["<|im_end|>"]}}}
        ids = CHAT.encode([user()], tools=[tool(parameters=schema)])
        special = KIMI.special_tokens
        assert ids.count(special["<|im_end|>"]) == 2
        assert '"<|im_end|>"' in KIMI.decode(ids, skip_special=True)

    def test_a_marker_cut_in_two_fields_stays_text(self):
        joined = template("{% for m in messages %}{{ m.content }}{% endfor %}end|>")
        ids = joined.encode([user("<|im"), user("_"), user("x<|im_")])
        assert max(ids) < 400
        assert KIMI.decode(ids, skip_special=False) == "<|im_x<|im_end|>"

    @given(st.lists(st.sampled_from([" the", "'s", "é", "a", "\n", " ", "中"])))
    @settings(max_examples=50)
    def test_ids_are_those_of_the_whole_text(self, parts):
        plain = template("A the{% for m in messages %}{{ m.content }}{% endfor %}e'")
        messages = [user(part) for part in parts] or [user("")]
        text = plain.render(messages)
        assert plain.encode(messages) == KIMI.encode(text)
        # A marker elsewhere changes nothing for them.
        ids = plain.encode([*messages, user("<think>")])
        assert ids == KIMI.encode("A the" + "".join(parts) + "<think>e'")

    def test_the_shield_is_refused_in_every_place(self):
        with pytest.raises(RequestError, match=r"messages: .*U\+FDD0") as caught:
            CHAT.encode([user(f"a{SHIELD}")])
        assert caught.value.param == "messages"
        with pytest.raises(RequestError, match=r"tools: .*U\+FDD0") as caught:
            CHAT.encode([user()], tools=[tool(description=SHIELD)])
        assert caught.value.param == "tools"

    @pytest.mark.parametrize("render", [CHAT.render, CHAT.encode])
    def test_lone_surrogates_are_refused(self, render):
        with pytest.raises(RequestError, match="surrogate"):
            render([user("a\ud800")])


class TestSandbox:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.__class__.__base__.__subclasses__() }}",
            "{{ messages[0].get.__globals__ }}",
            "{{ messages.__getattribute__('append') }}",
            "{{ raise_exception.__globals__ }}",
            "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
            "{{ '{0.__class__}'.format(messages) }}",
            "{{ messages | attr('__class__') | attr('__mro__') }}",
            "{{ messages | map(attribute='__class__') | list | tojson }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}{{ os.getcwd() }}",
        ],
    )
    def test_python_is_out_of_reach(self, source):
        try:
            text = template(source).render([user()])
        except RequestError:
            return
        for word in ("class", "object", "built-in", "method", "root:", "uid"):
            assert word not in text

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
            "{% endfor %}",
            "{% set n = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}"
            "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
            "{{ 'a' * 100000000000 }}",
            "{{ range(1000000000) | list }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ],
    )
    def test_runaway_templates_are_stopped(self, source):
        began = time.monotonic()
        with pytest.raises(RequestError, match="the chat template failed") as caught:
            template(source).render([user()])
        assert "\n" not in str(caught.value)
        assert time.monotonic() - began < 10

    def test_a_template_cannot_change_the_callers_messages(self):
        messages = [user(), user()]
        template("{{ messages.pop() }}{{ messages[0].update({'a': 1}) }}").render(
            messages
        )
        assert messages == [user(), user()]

    def test_large_conversations_fit(self):
        text = "x" * 4_000_000
        assert text in CHAT.render([user(text)])
        turns = [user(), {"role": "assistant", "content": "x"}] * 2000
        assert CHAT.render(turns).count("<|im_end|>") == 4000


class TestKwargs:
    @pytest.mark.parametrize(
        "name", ["messages", "tools", "tools_ts_str", "add_generation_prompt", "foo"]
    )
    def test_other_names_are_refused(self, name):
        match = f"chat_template_kwargs: {name}: expected one of preserve_thinking, thin"
        with pytest.raises(RequestError, match=match) as caught:
            CHAT.render([user()], kwargs={name: True})
        assert caught.value.param == "chat_template_kwargs"

    def test_names_that_the_template_does_not_know_are_refused(self):
        plain = template("{{ messages[0].content }}")
        for name in ("thinking", "enable_thinking", "preserve_thinking"):
            with pytest.raises(RequestError, match=f"{name}: expected one of none"):
                plain.render([user()], kwargs={name: True})
        other = template("{{ enable_thinking }}")
        assert other.render([user()], kwargs={"thinking": False}) == "False"

    @pytest.mark.parametrize("value", [None, 1, "false"])
    def test_values_must_be_true_or_false(self, value):
        with pytest.raises(RequestError, match="thinking: expected true or false"):
            CHAT.render([user()], kwargs={"thinking": value})

    def test_contradictions_are_refused(self):
        kwargs = {"thinking": True, "enable_thinking": False}
        with pytest.raises(RequestError, match="enable_thinking contradicts thinking"):
            CHAT.render([user()], kwargs=kwargs)
        CHAT.render([user()], kwargs=dict.fromkeys(kwargs, False))


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
DEEP = json.loads("[" * 70 + "]" * 70)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "messages: expected a list of at least one message"),
        ("hi", "messages: expected a list of at least one message"),
        (["hi"], r"messages\[0\]: expected an object"),
        ([{"content": "x"}], r"messages\[0\].role: None; expected one of system, user"),
        (
            [user(), user() | {"role": "bot"}],
            r"messages\[1\].role: 'bot'; expected one",
        ),
        ([user(7)], r"messages\[0\].content: expected a list"),
        ([user(["x"])], r"messages\[0\].content\[0\]: expected an object"),
        ([user([IMAGE])], r"content\[0\].type: 'image_url'; this engine reads text"),
        ([user([{"type": "text"}])], r"content\[0\].text: expected a string"),
        ([user([{"type": "text", "text": "", "x": 1}])], r"content\[0\].x: not a fie"),
        ([user(name=7)], r"messages\[0\].name: expected a string"),
        ([user(audio={"id": 1})], r"messages\[0\].audio: not a field of a message of"),
        ([user(tool_calls=[call()])], r"messages\[0\].tool_calls: not a field"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\].tool_call_id: missing"),
        ([{"role": "assistant", "tool_calls": {}}], "tool_calls: expected a list"),
        (
            [{"role": "assistant", "tool_calls": [call(arguments=[1])]}],
            r"tool_calls\[0\].function.arguments: expected a string or an object",
        ),
        (
            [{"role": "assistant", "tool_calls": [call() | {"type": "custom"}]}],
            r"tool_calls\[0\].type: 'custom'; expected 'function'",
        ),
        (
            [{"role": "assistant", "tool_calls": [call(name="a b")]}],
            r"function.name: 'a b'; expected letters, digits",
        ),
        ([{"role": "assistant", "tool_calls": [{}]}], "function: expected an object"),
        ([user(DEEP)], "messages: nested deeper than 64 levels"),
    ],
)
def test_messages_that_cannot_be_honoured(messages, match):
    with pytest.raises(RequestError, match=match) as caught:
        CHAT.render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("tools", "match"),
    [
        ({}, "tools: expected a list"),
        ([{"type": "web_search"}], r"tools\[0\].type: 'web_search'; expected 'func"),
        ([{"type": "function"}], r"tools\[0\].function: expected an object"),
        ([tool("a\nb")], r"tools\[0\].function.name: 'a\\nb'; expected letters"),
        ([tool(), tool(x=1)], r"tools\[1\].function.x: not a field of a function"),
        ([tool() | {"x": 1}], r"tools\[0\].x: expected function, type"),
        ([tool(parameters=[1])], r"tools\[0\].function.parameters: expected an obj"),
        ([tool(description=7)], r"tools\[0\].function.description: expected a str"),
        ([tool(parameters={"x": DEEP})], "tools: nested deeper than 64 levels"),
    ],
)
def test_tools_that_cannot_be_honoured(tools, match):
    with pytest.raises(RequestError, match=match) as caught:
        CHAT.render([user()], tools=tools)
    assert caught.value.param == "tools"


def test_tools_for_a_template_without_tools_are_refused():
    with pytest.raises(RequestError, match="template of this model has no tools"):
        template("{{ messages[0].content }}").render([user()], tools=TOOLS)


def test_what_the_template_itself_refuses_is_the_clients_message():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="says: roles must alternate") as caught:
        template(source).render([user()])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="asks for tojson"):
        template("{{ 1 | tojson(ensure_ascii=true) }}").render([user()])


class TestFiles:
    def config(self, directory, **config):
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return ChatTemplate.load(directory, tokenizer=KIMI)

    def test_no_template(self, tmp_path):
        assert ChatTemplate.load(tmp_path, tokenizer=KIMI) is None
        with pytest.raises(RequestError, match="has no chat template") as caught:
            require_template(None)
        assert caught.value.param == "messages"
        assert require_template(CHAT) is CHAT

    def test_template_of_the_tokenizer_config_and_its_markers(self, tmp_path):
        chat = self.config(
            tmp_path,
            chat_template="{{ bos_token }}{{ eos_token }}{{ messages[0].content }}",
            bos_token="[BOS]",
            eos_token={"content": "[EOS]"},
        )
        assert chat.render([user()]) == "[BOS][EOS]hi"
        special = KIMI.special_tokens
        assert chat.encode([user("a")]) == [special["[BOS]"], special["[EOS]"], 97]

    def test_the_file_wins(self, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("file")
        assert self.config(tmp_path, chat_template="key").render([user()]) == "file"

    def test_the_default_of_several(self, tmp_path):
        several = [{"name": n, "template": n} for n in ("tool_use", "default")]
        chat = self.config(tmp_path, chat_template=several)
        assert chat.render([user()]) == "default"
        with pytest.raises(TokenizerError, match="chat_template has no 'default'"):
            self.config(tmp_path, chat_template=several[:1])

    def test_broken_templates(self, tmp_path):
        with pytest.raises(TokenizerError, match="chat template: syntax error") as e:
            self.config(tmp_path, chat_template="{% for %}")
        assert "\n" not in str(e.value)
        with pytest.raises(TokenizerError, match="chat_template: expected a string"):
            self.config(tmp_path, chat_template=7)

    def test_the_tokenizer_of_the_directory_by_default(self):
        assert ChatTemplate.load(DATA).encode([user()]) == CHAT.encode([user()])


@pytest.mark.skipif(
    "DDTREE_KIMI_TOKENIZER" not in os.environ,
    reason="runs when DDTREE_KIMI_TOKENIZER names a folder with Kimi's tiktoken.model, "
    "tokenizer_config.json and chat_template.jinja of K2-Thinking or later",
)
def test_golden_ids_of_kimis_own_files():
    chat = ChatTemplate.load(pathlib.Path(os.environ["DDTREE_KIMI_TOKENIZER"]))
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "My name is Qwen2."},
    ]
    ids = (
        "163594 14062 163601 3900 554 261 13205 26626 13 163586 "
        "163587 2482 163601 24328 554 398 30 163586 "
        "163588 69702 163601 163606 163607 6725 1530 387 1999 33249 17 13 163586"
    )
    got = chat.encode(messages, add_generation_prompt=False)
    assert got == list(map(int, ids.split()))
