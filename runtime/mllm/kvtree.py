"""The prompt tree: which content exists, and which KV sequences hold it.

Every prompt is a path of items (token runs and images) from the root. Equal paths are one node, so equal
prompts are evaluated once, and the tree of KV states has the shape of the search that made it.

Terms:
    item      what a node adds to its parent: a run of text tokens, or an image
    sequence  a slot of the backend's KV cache; it holds one path from the root, or nothing
    holders   the sequences whose path runs through a node; while there is one, the node is resident

This module knows content and bookkeeping only; evaluating and copying is the backend's part, so that the
rules can be tested without a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any, Union
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ..errors import HoverlensError


@dataclass(frozen=True)
class TokenRun:
    """A run of text tokens."""

    tokens: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_positions(self) -> int:
        return len(self.tokens)

    def digest(self) -> bytes:
        return b"t" + np.asarray(self.tokens, dtype="<i4").tobytes()


@dataclass(frozen=True, eq=False)
class ImageItem:
    """An encoded image, or one tile of it. Identity is ``key`` and ``index`` alone.

    Attributes:
        key: Hex digest of the image's features (:attr:`ImageFeatures.key`).
        index: Which of the image's chunks.
        n_tokens: KV cells.
        n_positions: Positions that it advances; with M-RoPE fewer than tokens.
        chunk: Backend-private.
    """

    key: str
    index: int
    n_tokens: int
    n_positions: int
    chunk: Any = None

    def digest(self) -> bytes:
        return b"i" + bytes.fromhex(self.key) + self.index.to_bytes(4, "little")


Item = Union[TokenRun, ImageItem]  # noqa: UP007 - evaluated at run time on Python 3.10


class Node:
    """One point in the prompt tree.

    Attributes:
        parent: The node before, None at the root.
        item: What this node adds, None at the root.
        key: Digest of the whole path.
        end_tokens: KV cells that the whole path takes.
        end_position: Position of the first token after the path.
        holders: Sequences whose path includes this node.
        logits: float32 (n_vocab,), the model's output after the last token, where it was asked for.
        lost: It was resident, and dropped for lack of room.
    """

    __slots__ = (
        "__weakref__",
        "children",
        "end_position",
        "end_tokens",
        "holders",
        "item",
        "key",
        "logits",
        "lost",
        "parent",
    )

    def __init__(self, parent: Node | None, item: Item | None, key: bytes) -> None:
        self.parent = parent
        self.item = item
        self.key = key
        self.end_tokens: int = (parent.end_tokens if parent else 0) + (item.n_tokens if item else 0)
        self.end_position: int = (parent.end_position if parent else 0) + (item.n_positions if item else 0)
        self.holders: set[int] = set()
        self.children: WeakValueDictionary[bytes, Node] = WeakValueDictionary()
        self.logits: NDArray[np.float32] | None = None
        self.lost = False

    def child(self, item: Item) -> Node:
        """The node after ``item``; the same object for the same content while one is alive."""
        key = hashlib.blake2b(self.key + item.digest(), digest_size=16).digest()
        node = self.children.get(key)
        if node is None:
            node = Node(self, item, key)
            self.children[key] = node
        return node

    def path(self) -> list[Node]:
        """Nodes from the first after the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.item is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def up(self) -> Iterator[Node]:
        """This node, its parent, ..., the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def resident(self) -> bool:
        return bool(self.holders) or self.item is None


def root(model_identity: str) -> Node:
    """A fresh tree for one model."""
    return Node(None, None, hashlib.blake2b(model_identity.encode(), digest_size=16).digest())


class NoSequence(HoverlensError):
    """Every sequence or cell is pinned: what is asked for at once does not fit."""


@dataclass(eq=False)
class _Copy:
    """The cells of one evaluation of a node, and how many sequences share them."""

    sharers: int = 0


@dataclass
class _Slot:
    tip: Node | None = None
    copies: dict[int, _Copy] = field(default_factory=dict)  # by id of the nodes on the path to the tip
    used: int = 0
    pins: int = 0
    owner: Any = None


@dataclass
class SequencePool:
    """Hands out sequences, counts KV cells, and evicts the least recently used.

    A sequence is *pinned* while a request decodes in it, *retained* while a state owns it, else free.
    Retained sequences may be evicted: their owner's content is evaluated again when it is needed.

    Cells that one sequence got from another count once; what two sequences evaluated side by side counts twice,
    also where the content is equal.

    Attributes:
        n_sequences: Slots of the backend.
        n_cells: Tokens that all sequences may hold together.
        drop: Called with a sequence id when its cells are to be freed.
        extra_cells: Cells behind the content of the sequences: parts of nodes, and tokens being decoded.
    """

    n_sequences: int
    n_cells: int
    drop: Callable[[int], None]
    evictions: int = 0
    extra_cells: int = 0
    peak_cells: int = 0
    _slots: list[_Slot] = field(default_factory=list)
    _clock: int = 0
    _path_cells: int = 0

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.n_sequences)]

    # -- sequences ---------------------------------------------------------------------------------

    def take(self, spare: Container[Any] = ()) -> int:
        """A free sequence, pinned. Evicts if none is free, but not from an owner in ``spare``.

        Raises:
            NoSequence: All are pinned or spared.
        """
        self._clock += 1
        i = self._empty()
        if i is None and self.evict(spare):
            i = self._empty()
        if i is None:
            raise NoSequence(f"all {self.n_sequences} sequences are in use at once; raise n_sequences")
        self._slots[i].pins = 1
        self._slots[i].used = self._clock
        return i

    def _empty(self) -> int | None:
        for i, slot in enumerate(self._slots):
            if slot.tip is None and slot.pins == 0 and slot.owner is None:
                return i
        return None

    def in_use(self) -> int:
        """Sequences pinned or retained."""
        return sum(1 for s in self._slots if s.pins or s.owner is not None)

    def pin(self, seq: int) -> None:
        self._clock += 1
        self._slots[seq].pins += 1
        self._slots[seq].used = self._clock

    def pinned(self, seq: int) -> bool:
        return self._slots[seq].pins > 0

    def unpin(self, seq: int) -> None:
        assert self._slots[seq].pins > 0
        self._slots[seq].pins -= 1

    def retain(self, seq: int, owner: Any) -> None:
        """Keeps the sequence for ``owner`` (with a method ``lost_sequence()``) after it is unpinned."""
        self._slots[seq].owner = owner

    def release(self, seq: int, lost: bool = False) -> None:
        """Frees the sequence and its share of the cells.

        Args:
            seq: Which.
            lost: For lack of room: somebody may still need what it held.
        """
        slot = self._slots[seq]
        held = slot.tip.path() if slot.tip is not None else []
        self.move(seq, None)
        for node in held:
            node.lost = lost and not node.holders
        slot.owner = None
        slot.pins = 0
        self.drop(seq)

    def evict(self, spare: Container[Any] = ()) -> bool:
        """Frees the least recently used retained, unpinned sequence; False where there is none.

        Args:
            spare: Owners that keep theirs.
        """
        best: int | None = None
        for i, slot in enumerate(self._slots):
            if slot.owner is None or slot.pins or slot.owner in spare:
                continue
            if best is None or slot.used < self._slots[best].used:
                best = i
        if best is None:
            return False
        owner = self._slots[best].owner
        self.release(best, lost=True)
        owner.lost_sequence()
        self.evictions += 1
        return True

    # -- content -----------------------------------------------------------------------------------

    def tip(self, seq: int) -> Node | None:
        return self._slots[seq].tip

    def move(self, seq: int, tip: Node | None, source: int | None = None) -> None:
        """Says that the sequence now holds exactly the path to ``tip`` (None: nothing).

        Args:
            seq: Which.
            tip: Where it ends now.
            source: The sequence whose cells it shares from now on, where it does not have its own; None: it
                evaluated what is new.
        """
        slot = self._slots[seq]
        old_path = {id(n): n for n in slot.tip.path()} if slot.tip is not None else {}
        new_path = {id(n): n for n in tip.path()} if tip is not None else {}
        for key, node in old_path.items():
            if key not in new_path:
                node.holders.discard(seq)
                copy = slot.copies.pop(key)
                copy.sharers -= 1
                if not copy.sharers:
                    self._path_cells -= node.item.n_tokens  # type: ignore[union-attr]
        for key, node in new_path.items():
            if key not in old_path:
                copy = slot.copies[key] = self._slots[source].copies[key] if source is not None else _Copy()
                if not copy.sharers:
                    self._path_cells += node.item.n_tokens  # type: ignore[union-attr]
                copy.sharers += 1
                node.holders.add(seq)
                node.lost = False
        slot.tip = tip
        self._clock += 1
        slot.used = self._clock
        self.peak_cells = max(self.peak_cells, self.cells)

    @property
    def cells(self) -> int:
        """KV cells in use: what the sequences hold, and the tokens of running requests behind it."""
        return self._path_cells + self.extra_cells

    def room(self, n: int, spare: Container[Any] = ()) -> int:
        """Cells to be had, at most n; evicts for them, but not from an owner in ``spare``."""
        while self.cells + n > self.n_cells and self.evict(spare):
            pass
        return max(0, min(n, self.n_cells - self.cells))

    def reserve(self, n: int, spare: Container[Any] = ()) -> None:
        """Makes room for n more cells as :meth:`room` does.

        Raises:
            NoSequence: There is not enough.
        """
        if self.room(n, spare) < n:
            raise NoSequence(f"{self.cells + n} tokens at once do not fit a KV cache of {self.n_cells}")
