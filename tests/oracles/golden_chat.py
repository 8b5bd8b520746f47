"""Makes chat.json: prompts by transformers' Jinja and tiktoken, and their answers."""

from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

from tiny.tokenizer_files import SPECIAL_OFFSETS, special_token_id

from .checkpoint_files import write_json
from .decode import greedy, reply
from .encoding import load_encoding
from .load import load_target
from .margins import check

TOKENS = 32
# Tokens that give an answer more parts than its text.
STRUCTURE = {
    special_token_id(name)
    for name in SPECIAL_OFFSETS
    if "think" in name or "tool_call" in name
}
# name, messages, keyword arguments of the template
CONVERSATIONS = (
    (
        "single_turn",
        [{"role": "user", "content": "What is a tree?"}],
        {},
    ),
    (
        "history",
        [
            {"role": "system", "content": "Answer in one line."},
            {"role": "user", "content": "Name a colour."},
            {"role": "assistant", "content": "Grün – green."},
            {"role": "user", "content": "A darker one?"},
        ],
        {},
    ),
    (
        "no_thinking",
        [{"role": "user", "content": "Count to five: 一, 二, …"}],
        {"thinking": False},
    ),
)


def build(directory: Path, target: Path) -> None:
    """Writes chat.json into `directory` for the checkpoint `target`."""
    model, encoding = load_target(target), load_encoding(target)
    template = (target / "chat_template.jinja").read_text()
    entries = []
    for name, messages, kwargs in CONVERSATIONS:
        [rendered], _ = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True, **kwargs
        )
        ids = encoding.encode(rendered, allowed_special="all")
        tokens, _ = greedy(model, f"chat {name}", ids, TOKENS)
        check(STRUCTURE.isdisjoint(tokens), f"chat {name}: the answer has parts")
        entries.append(
            {
                "name": name,
                "messages": messages,
                "chat_template_kwargs": kwargs,
                "rendered": rendered,
                "prompt_ids": ids,
                "max_tokens": TOKENS,
                "tokens": tokens,
                **reply(tokens),
            }
        )
    reasons = {entry["finish_reason"] for entry in entries}
    check(len(reasons) == 2, f"the chats end with {reasons} only")
    write_json(directory / "chat.json", entries)
