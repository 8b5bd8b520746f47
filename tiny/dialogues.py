"""Owns how functions of the corpus become chat turns, so that chat answers code.

A turn asks for a function by its name and summary, or shows its signature; the
answer is the function. The markup is that of chat_template.jinja.
"""

import ast
import random
import warnings

_LONGEST = 1500  # Characters of a function.


def dialogues(text: str, rng: random.Random, *, share: float) -> list[list[str]]:
    """Returns chats about the text's documented functions, as pieces of text.

    Pieces at odd places are names of special tokens.

    Args:
      share: Of the functions, how many are asked for.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of the corpus's own string escapes.
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    lines = text.split("\n")
    found = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef) or rng.random() > share:
            continue
        docstring = ast.get_docstring(node)
        code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if docstring and len(code) <= _LONGEST:
            found.append(_dialogue(node.name, docstring, code, rng))
    return found


def _dialogue(name: str, docstring: str, code: str, rng: random.Random) -> list[str]:
    summary = " ".join(docstring.split("\n\n")[0].split())
    signature = code[: code.find('"""')].rstrip()
    question = rng.choice(
        [
            f"Write a Python function `{name}`: {summary}",
            f"Write a function that does this: {summary}",
            f"{summary}",
            f"Complete this function:\n{signature}",
            signature,
        ]
    )
    # Thinking on and off: the answer has no thoughts either way.
    return [
        "",
        "<|im_user|>",
        "user",
        "<|im_middle|>",
        question,
        "<|im_end|>",
        "",
        "<|im_assistant|>",
        "assistant",
        "<|im_middle|>",
        "",
        "<think>",
        "",
        "</think>",
        f"{code}\n",
        "<|im_end|>",
        "",
        "[EOS]",
    ]
