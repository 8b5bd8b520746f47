"""Reads the text of a compiled program: computations, instructions, loops."""

import re
from collections import Counter
from collections.abc import Iterator

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
HOST = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")


class Program:
    """One compiled module."""

    def __init__(self, text: str):
        self.text = text
        self.computations: dict[str, list[str]] = {}
        self.entry = ""
        name = None
        for line in text.splitlines():
            header = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
            if header and not line.startswith("HloModule"):
                name = header[2]
                self.computations[name] = []
                if header[1]:
                    self.entry = name
            elif name and " = " in line:
                self.computations[name].append(line.strip())

    def instructions(self, root: str | None = None) -> Iterator[tuple[str, str]]:
        """Yields (opcode, line) of a computation and of all that it calls."""
        seen, left = set(), [root or self.entry]
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            for line in self.computations[name]:
                yield opcode(line), line
                left += [
                    c
                    for c in re.findall(r"%([\w.\-]+)", line)
                    if c in self.computations
                ]

    def count(self, root: str | None = None) -> Counter[str]:
        """Counts opcodes; asynchronous pairs count once."""
        return Counter(
            code.removesuffix("-start")
            for code, _ in self.instructions(root)
            if not code.endswith("-done")
        )

    def loop_bodies(self) -> list[str]:
        """Returns the bodies of all while loops."""
        return [
            re.search(r"body=%([\w.\-]+)", line)[1]
            for code, line in self.instructions()
            if code == "while"
        ]


def opcode(line: str) -> str:
    """Returns the opcode of an instruction line: the word before its operands."""
    right = line.split(" = ", 1)[1]
    # The shape may be a tuple, with brackets and comments inside.
    return re.search(r"(?:^|[\s)\]}])([a-z][\w\-]*)\(", right)[1]
