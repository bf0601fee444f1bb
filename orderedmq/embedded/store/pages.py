"""Reads LMDB's pages without LMDB, and verifies that the trees of a snapshot are intact. Pure.

LMDB trusts its pages. A changed bit in a page can make LMDB lose entries, return older ones, loop, or read beyond its map,
which kills the process. So this module walks the trees before LMDB reads them, and checks every number before using it: page
numbers and flags, node positions, the order of keys, the key bounds that a parent sets for its children, and the page and entry
counts of a tree. It also checks that no page is used twice, or both used and free. It does not check the content of values,
because their seals protect it.

The layout is LMDB 0.9's data version 1 (``mdb.c``): two meta pages, then B-trees. Page numbers have 64 bits, in the machine's byte order.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import ge
from typing import Final, NamedTuple

import numpy as np

VERSION: Final = 1
MAGIC: Final = 0xBEEFC0DE
#: The root of a tree without entries.
NONE: Final = (1 << 64) - 1
#: Page flags.
_BRANCH, _LEAF, _OVERFLOW, _META = 1, 2, 4, 8
#: Node flags: the value is stored on separate pages; the value is a tree.
_BIG, _TREE_VALUE = 1, 2
_INTEGER_KEYS: Final = 8
_MAX_DEPTH: Final = 32
#: Maximum size of a map in bytes: no machine maps more.
_MAX_MAP: Final = 1 << 47
_HEADER: Final = 16
_NODE_HEADER: Final = 8
_META_SIZE: Final = 152

_PAGE = struct.Struct("=QHHHH")
_OVERFLOW_PAGE = struct.Struct("=QHHI")
_META_HEAD = struct.Struct("=IIQQ")
_META_TAIL = struct.Struct("=QQ")
_TREE = struct.Struct("=IHHQQQQQ")
_NUMBER = struct.Struct("=Q")

Read = Callable[[int, int], bytes]
Report = Callable[[str], None]


class Tree(NamedTuple):
    """LMDB's record of a database: its root page, and how many pages and entries it has."""

    pad: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflow: int
    entries: int
    root: int


class Meta(NamedTuple):
    """A meta page: the roots of a snapshot. LMDB uses the meta page with the greater transaction number."""

    page_size: int
    map_size: int
    free: Tree
    main: Tree
    last_page: int
    transaction: int


class TreeEntry(NamedTuple):
    """An entry of a tree. If ``value`` is None, the value is stored on ``page`` and the pages after it."""

    key: bytes
    value: bytes | None
    size: int
    page: int
    is_tree: bool


class _Nodes(NamedTuple):
    """The nodes of a page: their keys and flags, and the sizes and positions of their values.

    In a branch page, the sizes are the lower halves of the child pages' numbers.
    """

    keys: list[bytes]
    flags: list[int]
    sizes: list[int]
    positions: list[int]


def metas(read: Read) -> tuple[Meta, Meta] | None:
    """Return both meta pages, unverified, or None if the file has no meta pages. In that case LMDB reports what is wrong with the file."""
    first = read(0, _META_SIZE)
    if not _is_meta(first):
        return None
    size = _meta(first).page_size
    if not _is_size(size):
        # Without a valid page size, the position of the second meta page is unknown. `wrong_metas` reports the page size.
        return _meta(first), _meta(first)
    second = read(size, _META_SIZE)
    return (_meta(first), _meta(second)) if _is_meta(second) else None


def _is_size(size: int) -> bool:
    return 512 <= size <= 65536 and not size & (size - 1)


def _is_meta(page: bytes) -> bool:
    if len(page) < _META_SIZE:
        return False
    magic, version, _, _ = _META_HEAD.unpack_from(page, _HEADER)
    return bool(_PAGE.unpack_from(page)[2] & _META) and magic == MAGIC and version == VERSION


def _meta(page: bytes) -> Meta:
    _, _, _, map_size = _META_HEAD.unpack_from(page, _HEADER)
    free, main = Tree(*_TREE.unpack_from(page, 40)), Tree(*_TREE.unpack_from(page, 88))
    last, transaction = _META_TAIL.unpack_from(page, 136)
    return Meta(free.pad, map_size, free, main, last, transaction)


def wrong_metas(pair: tuple[Meta, Meta]) -> str | None:
    """Return a fault of the meta pages that would crash LMDB or that LMDB would not notice; None if there is none."""
    size = pair[0].page_size
    if not _is_size(size):
        return f"meta page 0 names a page size of {size} bytes"
    for number, meta in enumerate(pair):
        if meta.page_size != size:
            return f"meta pages name page sizes of {size} and {meta.page_size} bytes"
        if meta.free.flags != _INTEGER_KEYS or meta.main.flags:
            return f"meta page {number} has flags that no store has"
        if meta.map_size > _MAX_MAP or meta.last_page >= max(2, meta.map_size // size):
            return f"meta page {number} names a last page {meta.last_page} and a map of {meta.map_size} bytes"
        if meta.transaction and meta.transaction & 1 != number:
            return f"meta page {number} has transaction {meta.transaction}, which belongs in the other meta page"
    first, second = (meta.transaction for meta in pair)
    if abs(first - second) > 1:
        return f"meta pages have transactions {first} and {second}, which do not follow each other"
    return None


class Snapshot:
    """The trees of one meta page. ``report`` is called with each finding and may raise."""

    def __init__(self, read: Read, meta: Meta, report: Report) -> None:
        self._read = read
        self._meta = meta
        self._report = report
        self._size = meta.page_size
        #: Pages that belong to a tree.
        self._seen: set[int] = set()
        #: Runs of pages that hold one value: first page and number of pages.
        self._runs: list[tuple[int, int]] = []

    def databases(self) -> dict[str, Tree]:
        """Return the trees by name, without other entries of the main tree."""
        out = {}
        for entry in self.entries(self._meta.main, "the list of databases"):
            if entry.is_tree and entry.value is not None and len(entry.value) == _TREE.size:
                out[entry.key.decode(errors="backslashreplace")] = Tree(*_TREE.unpack(entry.value))
        return out

    def entries(self, tree: Tree, name: str, *, numbers: bool = False, exact: bool = False) -> Iterator[TreeEntry]:
        """Yield the entries of a tree in order. Damaged entries are reported and left out.

        ``numbers``: keys are integers in the machine's byte order. ``exact``: values are never overwritten, so a value on separate
        pages has exactly as many pages as it needs.
        """
        for number, page, nodes, firsts in self._leaves(tree, name, numbers, exact):
            for at, (key, flags, size, position) in enumerate(zip(*nodes)):
                if flags != _BIG:
                    yield TreeEntry(key, page[position : position + size], size, number, flags == _TREE_VALUE)
                elif firsts[at]:
                    yield TreeEntry(key, None, size, firsts[at], False)

    def walk(self, tree: Tree, name: str, *, exact: bool) -> None:
        """Report damage in a tree, without yielding entries. ``exact``: see `entries`."""
        for _ in self._leaves(tree, name, False, exact):
            pass

    def _leaves(self, tree: Tree, name: str, numbers: bool, exact: bool) -> Iterator[tuple[int, bytes, _Nodes, dict[int, int]]]:
        """Yield each leaf page: its number, content and nodes, and the first pages of its large values by node index (0: damaged)."""
        if tree.flags != (_INTEGER_KEYS if numbers else 0):
            # LMDB would treat the entries differently, for example keep several values of a key.
            self._report(f"{name} has flags {tree.flags}, which no database of a store has")
            return
        if tree.root == NONE:
            if tree.entries or tree.depth or tree.leaves or tree.branches or tree.overflow:
                self._report(f"{name} has no root, but says that it has {tree.entries} entries")
            return
        if not 1 <= tree.depth <= _MAX_DEPTH:
            self._report(f"{name} says that it is {tree.depth} pages deep")
            return
        branches = leaves = overflow = entries = 0
        stack: list[tuple[int, int, bytes | int | None, bytes | int | None]] = [(tree.root, 1, None, None)]
        while stack:
            number, level, low, high = stack.pop()
            leaf = level == tree.depth
            page = self._page(number, name, leaf)
            nodes = self._nodes(page, number, name, leaf) if page is not None else None
            if page is None or nodes is None:
                continue
            keys: list[bytes] | list[int] = nodes.keys
            if numbers:
                keys = [int.from_bytes(key, sys.byteorder) for key in nodes.keys]
            # The first key of a branch is not compared, because its child holds all keys below the second one.
            ordered = keys if leaf else keys[1:]
            if ordered and not _in_order(ordered, low, high):
                self._report(
                    f"page {number} of {name} has keys that are out of order, or outside the bounds that the page above sets"
                )
                continue
            if not leaf:
                branches += 1
                bounds = [low, *ordered, high]
                for half, flags, pair in reversed(list(zip(nodes.sizes, nodes.flags, pairwise(bounds)))):
                    stack.append((half | flags << 32, level + 1, *pair))
                continue
            leaves += 1
            entries += len(keys)
            firsts: dict[int, int] = {}
            for at, flags in enumerate(nodes.flags):
                if flags == _BIG:
                    firsts[at] = _NUMBER.unpack_from(page, nodes.positions[at])[0]
                    pages = self._run(firsts[at], nodes.sizes[at], name, exact)
                    overflow += pages
                    if not pages:
                        firsts[at] = 0
            yield number, page, nodes, firsts
        found = (branches, leaves, overflow, entries)
        said = (tree.branches, tree.leaves, tree.overflow, tree.entries)
        if found != said:
            self._report(f"{name} says that it has {said} (branch pages, leaf pages, value pages, entries), but has {found}")

    def value(self, entry: TreeEntry) -> bytes:
        """Return an entry's value. It is shorter than ``entry.size`` if the file ends within it."""
        if entry.value is not None:
            return entry.value
        return self._read(entry.page * self._size + _HEADER, entry.size)

    def require_free(self) -> None:
        """Check that no page is used twice, or both used and free. Call this after walking all trees."""
        free: list[np.ndarray] = []
        count = 0
        for entry in self.entries(self._meta.free, "the list of free pages", numbers=True):
            value = self.value(entry)
            pages = np.frombuffer(value[: len(value) // 8 * 8], dtype=np.uint64)
            if len(entry.key) != 8 or int.from_bytes(entry.key, sys.byteorder) > self._meta.transaction:
                self._report(f"the list of free pages has an entry of transaction {int.from_bytes(entry.key, sys.byteorder)}")
                continue
            if not len(pages) or int(pages[0]) >= len(pages):
                self._report("the list of free pages has an entry that is longer than its value")
                continue
            listed = pages[1 : 1 + int(pages[0])]
            if len(listed) > 1 and not bool((listed[:-1] > listed[1:]).all()):
                self._report("the list of free pages is out of order")
                continue
            free.append(listed)
            count += len(listed)
        firsts = [*self._seen, *(first for first, _ in self._runs)]
        lengths = [1] * len(self._seen) + [length for _, length in self._runs]
        begins = np.concatenate([np.array(firsts, dtype=np.uint64), *free])
        ends = begins + np.concatenate([np.array(lengths, dtype=np.uint64), np.ones(count, dtype=np.uint64)])
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], ends[order]
        twice = np.flatnonzero(begins[1:] < ends[:-1])
        if len(twice):
            self._report(f"page {int(begins[1:][twice[0]])} is used twice, or is free and used")
        if len(begins) and (int(begins[0]) < 2 or int(ends[-1]) > self._meta.last_page + 1):
            self._report(
                f"pages {int(begins[0])} to {int(ends[-1]) - 1} are used or free, but the file has pages 2 to {self._meta.last_page}"
            )

    def _page(self, number: int, name: str, leaf: bool) -> bytes | None:
        """Return a page of a tree, or None after reporting damage."""
        if number in self._seen or not 2 <= number <= self._meta.last_page:
            self._report(
                f"{name} leads to page {number}, which {'it already has' if number in self._seen else 'does not exist'}"
            )
            return None
        self._seen.add(number)
        page, size = self._read(number * self._size, self._size), self._size
        if len(page) < size:
            self._report(f"page {number} of {name} is after the end of the file")
            return None
        itself, _, flags, lower, upper = _PAGE.unpack_from(page)
        if itself != number or flags != (_LEAF if leaf else _BRANCH):
            self._report(f"page {number} of {name} has a wrong number or kind (number {itself}, flags {flags})")
            return None
        if lower & 1 or not _HEADER + (0 if leaf else 2) <= lower <= upper <= size:
            self._report(f"page {number} of {name} says that it is filled from {upper} on and has pointers up to {lower}")
            return None
        return page

    def _nodes(self, page: bytes, number: int, name: str, leaf: bool) -> _Nodes | None:
        """Return the nodes of a page, or None after reporting damage."""
        _, _, _, lower, upper = _PAGE.unpack_from(page)
        count = (lower - _HEADER) // 2
        if not count:
            return _Nodes([], [], [], [])
        halves = np.frombuffer(page, dtype=np.uint16)
        at = halves[_HEADER // 2 : lower // 2].astype(np.int64)
        if int(at.min()) < upper or int(at.max()) + _NODE_HEADER > len(page) or bool((at & 1).any()):
            self._report(f"page {number} of {name} has a node outside the filled part of the page")
            return None
        first = at >> 1
        low, high = (0, 1) if sys.byteorder == "little" else (1, 0)
        words = halves[first + low].astype(np.int64) | halves[first + high].astype(np.int64) << 16
        flags = halves[first + 2]
        begins = at + _NODE_HEADER
        positions = begins + halves[first + 3]
        ends = positions
        if leaf:
            ends = positions + np.where(flags & _BIG, 8, words)
            if int(flags.max()) > _TREE_VALUE:
                self._report(f"page {number} of {name} has a node with flags {int(flags.max())}")
                return None
        if int(ends.max()) > len(page):
            self._report(f"page {number} of {name} has a node that goes beyond the page")
            return None
        order = np.argsort(at)
        if bool((ends[order[:-1]] > at[order[1:]]).any()):
            self._report(f"page {number} of {name} has nodes that overlap")
            return None
        behind = positions.tolist()
        keys = [page[begin:end] for begin, end in zip(begins.tolist(), behind)]
        return _Nodes(keys, flags.tolist(), words.tolist(), behind)

    def _run(self, first: int, size: int, name: str, exact: bool) -> int:
        """Record the pages of a value and return how many they are, or 0 after reporting damage."""
        head = self._read(first * self._size, _HEADER) if 2 <= first <= self._meta.last_page else b""
        pages = _pages_of_head(head, first, (_HEADER + size + self._size - 1) // self._size, exact)
        if not pages or first < 2 or first + pages - 1 > self._meta.last_page:
            self._report(f"{name} has a value of {size} bytes on page {first}, which is not the first page of such a value")
            return 0
        self._runs.append((first, pages))
        return pages


def _in_order(keys: list[bytes] | list[int], low: bytes | int | None, high: bytes | int | None) -> bool:
    """Whether each key is greater than the previous one, and all keys are within the bounds."""
    if any(map(ge, keys, keys[1:])):
        return False
    return (low is None or low <= keys[0]) and (high is None or keys[-1] < high)  # type: ignore[operator]


def _pages_of_head(head: bytes, first: int, least: int, exact: bool) -> int:
    """Return how many pages a value has according to its first page, or 0 if that number is impossible.

    Without ``exact``, a value may have more than ``least`` pages, because a value that has shrunk keeps its pages.
    """
    if len(head) < _HEADER:
        return 0
    itself, _, flags, pages = _OVERFLOW_PAGE.unpack(head)
    fits = pages == least if exact else pages >= least
    return int(pages) if itself == first and flags == _OVERFLOW and fits else 0
