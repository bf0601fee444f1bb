"""Counts expressions that make a reader stop, in comments, texts and documents. ``make lint`` rejects new ones.

``wording.json`` says how often each expression may still occur in a folder. These counts may only shrink: a count that is lower
than allowed also fails, until ``python -m tests.wording --shrink`` has recorded it.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ALLOWED: Final = Path(__file__).with_name("wording.json")
PLACES: Final = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "bench",
    "docs",
    "ordered_sink",
    "ordered_source",
    "orderedmq",
    "tests",
)
#: Maps each expression to what to write instead.
PATTERNS: Final = {
    r"of (?:its|their|your|my) own": "its own, separate, another",
    r", too\b": "also",
    r"\banew\b": "again",
    r"\bmend(?:s|ed|ing)?\b": "repair, heal",
    r"\b(?:lies|lying|lie|lay)\b": "is, is stored",
    r"\bin place of\b": "instead of",
    r"\b(?:go|goes|going|went|gone) on\b": "continue, resume",
    r"\bput(?:s|ting)? aside\b": "park, or make it a dead letter",
    r"\bbehind\b": "after",
    r"\bbesides?\b": "next to, in addition to",
    r"\b(?:told|tells? of)\b": "say, report, pass",
    r"\bwhat of\b": "which",
    r"\bcomes? to\b": "reach, amount to",
}
#: A string with fewer words than this is taken for a name or a value.
_WORDS: Final = 4


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line of prose in a file with its number: of a document, everything but code; of a module, comments and long strings."""
    if path.suffix == ".md":
        prose = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.DOTALL)
        yield from enumerate(re.sub(r"`[^`\n]*`", "", prose).split("\n"), 1)
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    # Strings come from the syntax tree, because releases of Python tokenise an f-string differently.
    for node in _strings(ast.parse(path.read_text())):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        string = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
        if len(string.split()) >= _WORDS:
            yield from enumerate(string.split("\n"), node.lineno)


def _strings(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    """Yield the strings of a module. A string that is written in several pieces is yielded as a whole."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            yield child
        else:
            yield from _strings(child)


def found() -> dict[str, dict[str, list[str]]]:
    """Return where each expression occurs, by folder: ``path:line: text``."""
    out: dict[str, dict[str, list[str]]] = {pattern: {} for pattern in PATTERNS}
    for place in PLACES:
        files = [ROOT / place] if place.endswith(".md") else sorted((ROOT / place).rglob("*"))
        for path in files:
            if path.suffix not in (".md", ".py") or path == Path(__file__) or "reference" in path.parts:
                continue
            for line, text in texts(path):
                for pattern in PATTERNS:
                    for _ in re.findall(pattern, text):
                        out[pattern].setdefault(place, []).append(f"{path.relative_to(ROOT)}:{line}: {text.strip()}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shrink", action="store_true", help="record the counts that are lower than before")
    parser.add_argument("--show", metavar="TEXT", help="list the places of the expressions whose pattern contains TEXT")
    asked = parser.parse_args()
    now = found()
    if asked.show:
        for pattern, places in now.items():
            if asked.show in pattern:
                print("\n".join(one for some in places.values() for one in some))
        return 0
    counts = {pattern: {place: len(some) for place, some in places.items()} for pattern, places in now.items()}
    allowed: dict[str, dict[str, int]] = json.loads(ALLOWED.read_text()) if ALLOWED.exists() else counts
    more, fewer = Counter[tuple[str, str]](), False
    for pattern, instead in PATTERNS.items():
        for place in PLACES:
            have, may = counts[pattern].get(place, 0), allowed.get(pattern, {}).get(place, 0)
            fewer |= have < may
            if have > may:
                more[pattern, place] = have - may
                print(
                    f"{place}: {pattern!r} occurs {have} times, {may} are allowed: write {instead}. --show TEXT lists the places"
                )
    if more:
        return 1
    if asked.shrink or not ALLOWED.exists():
        ALLOWED.write_text(json.dumps(counts, indent=1) + "\n")
        return 0
    if fewer:
        print("some expressions occur less often than before: run python -m tests.wording --shrink")
    return int(fewer)


if __name__ == "__main__":
    sys.exit(main())
