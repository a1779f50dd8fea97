"""The prompt tree's bookkeeping, against a naive model that counts everything again each time."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hoverlens.runtime.mllm.kvtree import ImageItem, Item, Node, NoSequence, SequencePool, TokenRun, root

ITEMS: tuple[Item, ...] = (
    TokenRun((1,)),
    TokenRun((2,)),
    TokenRun((1, 2)),
    TokenRun((3, 4, 5)),
    ImageItem("aa" * 16, 0, 9, 3),
    ImageItem("bb" * 16, 0, 9, 3),
)
PATHS = st.lists(st.integers(0, len(ITEMS) - 1), max_size=5).map(tuple)


def walk(start: Node, path: tuple[int, ...]) -> Node:
    for i in path:
        start = start.child(ITEMS[i])
    return start


def image(key: str = "aa" * 16, index: int = 0, tokens: int = 9, positions: int = 3, chunk: Any = None) -> ImageItem:
    return ImageItem(key, index, tokens, positions, chunk)


@given(PATHS, PATHS)
def test_equal_content_is_one_node_and_only_that(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    tree = root("model")
    first, second = walk(tree, a), walk(tree, b)
    assert (first is second) == (a == b)
    assert (first.key == second.key) == (a == b)


@given(PATHS)
def test_a_node_knows_its_tokens_positions_and_path(path: tuple[int, ...]) -> None:
    node = walk(root("model"), path)
    items = [ITEMS[i] for i in path]
    assert [n.item for n in node.path()] == items
    assert node.end_tokens == sum(i.n_tokens for i in items)
    assert node.end_position == sum(i.n_positions for i in items)
    assert [n.item for n in node.up()][::-1] == [None, *items]


def test_a_key_depends_on_model_text_image_and_order() -> None:
    def key(model: str, *items: Item) -> bytes:
        node = root(model)
        for item in items:
            node = node.child(item)
        return node.key

    keys = [
        key("m"),
        key("n"),
        key("m", TokenRun((1,))),
        key("m", TokenRun((2,))),
        key("m", TokenRun((1,)), TokenRun((2,))),
        key("m", TokenRun((2,)), TokenRun((1,))),
        key("m", image()),
        key("m", image(index=1)),
        key("m", image("cc" * 16)),
        key("m", image(), TokenRun((1,))),
        key("m", TokenRun((1,)), image()),
    ]
    assert len(set(keys)) == len(keys)


def test_a_key_changes_only_on_purpose() -> None:
    """A frozen digest: if this fails, everything that was ever keyed by content is keyed anew."""
    node = root("model").child(TokenRun((1, 2, 3))).child(image("0f" * 16, 1))
    assert node.key.hex() == "3bd9dbc6a34135b840caad19c13ffade"


def test_an_image_is_its_key_and_never_its_object() -> None:
    tree = root("model")
    assert tree.child(image(chunk=object())) is tree.child(image(chunk=object()))
    assert tree.child(image()) is not tree.child(image("ab" * 16))


def test_a_node_that_nobody_holds_is_forgotten() -> None:
    tree = root("model")
    node = tree.child(TokenRun((1,))).child(TokenRun((2,)))
    assert len(tree.children) == 1
    del node
    gc.collect()
    assert len(tree.children) == 0


class Owner:
    """Stands for a state."""

    def __init__(self) -> None:
        self.lost = 0

    def lost_sequence(self) -> None:
        self.lost += 1


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool as a backend does, and recounts everything from what each sequence holds."""

    @initialize(n=st.integers(1, 5), cells=st.sampled_from([15, 40, 90, 500]))
    def start(self, n: int, cells: int) -> None:
        self.tree = root("model")
        self.dropped: list[int] = []
        self.pool = SequencePool(n, cells, self.dropped.append)
        self.n = n
        self.held: dict[int, tuple[int, ...]] = {}
        self.copies: dict[int, dict[tuple[int, ...], object]] = {}
        self.pins: dict[int, int] = {}
        self.owners: dict[int, Owner] = {}
        self.order: list[int] = []  # least recently used first

    def used(self, seq: int) -> None:
        if seq in self.order:
            self.order.remove(seq)
        self.order.append(seq)

    def evictable(self, spare: list[Owner]) -> list[int]:
        return [s for s in self.order if s in self.owners and not self.pins.get(s) and self.owners[s] not in spare]

    def spared(self, data: st.DataObject) -> list[Owner]:
        owners = list(self.owners.values())
        return data.draw(st.lists(st.sampled_from(owners), unique=True)) if owners else []

    def forget(self, seq: int) -> None:
        owner = self.owners.pop(seq, None)
        if owner is not None:
            assert owner.lost == 1
        self.held.pop(seq, None)
        self.copies.pop(seq, None)
        self.pins.pop(seq, None)

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        spare = self.spared(data)
        free = [s for s in range(self.n) if not self.pins.get(s) and s not in self.owners]
        evictable = self.evictable(spare)
        if not free and not evictable:
            with pytest.raises(NoSequence, match=f"all {self.n} sequences"):
                self.pool.take(spare)
            return
        seq = self.pool.take(spare)
        if free:
            assert seq in free
        else:
            assert seq == evictable[0]
            self.forget(seq)
        self.pins[seq] = 1
        self.used(seq)
        donors = sorted(self.held)
        if donors and data.draw(st.booleans()):
            donor = data.draw(st.sampled_from(donors))
            path = self.held[donor]
            self.hold(seq, path[: data.draw(st.integers(0, len(path)))], donor)
        self.hold(seq, self.held.get(seq, ()) + data.draw(PATHS), None)

    def hold(self, seq: int, path: tuple[int, ...], source: int | None) -> None:
        self.pool.move(seq, walk(self.tree, path) if path else None, source)
        own, others = self.copies.get(seq, {}), self.copies.get(source, {}) if source is not None else {}
        prefixes = [path[:i] for i in range(1, len(path) + 1)]
        self.copies[seq] = {p: own[p] if p in own else others.get(p, object()) for p in prefixes}
        self.held[seq] = path
        self.used(seq)

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data(), path=PATHS)
    def evaluate(self, data: st.DataObject, path: tuple[int, ...]) -> None:
        seq = data.draw(st.sampled_from([s for s, n in self.pins.items() if n]))
        self.hold(seq, path, None)

    @precondition(lambda self: any(self.pins.values()) and len(self.held) > 1)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([s for s, n in self.pins.items() if n]))
        donor = data.draw(st.sampled_from(sorted(self.held)))
        path = self.held[donor]
        self.hold(seq, path[: data.draw(st.integers(0, len(path)))], donor)

    @precondition(lambda self: 1 in self.pins.values())
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([s for s, n in self.pins.items() if n == 1]))
        owner = self.owners.get(seq) or Owner()
        self.pool.retain(seq, owner)
        self.pool.unpin(seq)
        self.owners[seq] = owner
        self.pins[seq] = 0

    @precondition(lambda self: bool(self.owners))
    @rule(data=st.data())
    def pin_as_donor(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.owners)))
        self.pool.pin(seq)
        self.used(seq)
        self.pins[seq] = self.pins.get(seq, 0) + 1

    @rule(data=st.data())
    @precondition(lambda self: any(n > 1 for n in self.pins.values()))
    def unpin_donor(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([s for s, n in self.pins.items() if n > 1]))
        self.pool.unpin(seq)
        self.pins[seq] -= 1

    @precondition(lambda self: bool(self.held or self.owners))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted({*self.held, *self.owners})))
        self.pool.release(seq)
        assert self.dropped[-1] == seq
        self.owners.pop(seq, None)  # who releases knows it
        self.forget(seq)
        self.used(seq)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        spare = self.spared(data)
        evictable = self.evictable(spare)
        before = len(self.dropped)
        assert self.pool.evict(spare) == bool(evictable)
        assert self.dropped[before:] == evictable[:1]
        for seq in evictable[:1]:
            self.forget(seq)
            self.used(seq)

    @rule(n=st.integers(0, 40), data=st.data())
    def room(self, n: int, data: st.DataObject) -> None:
        spare = self.spared(data)
        evictable = self.evictable(spare)
        before = len(self.dropped)
        found = self.pool.room(n, spare)
        assert 0 <= found <= n
        gone = self.dropped[before:]
        assert gone == evictable[: len(gone)]
        if found < n:
            assert gone == evictable
            assert found == max(0, self.pool.n_cells - self.pool.cells)
        for seq in gone:
            self.forget(seq)
            self.used(seq)

    @rule(n=st.integers(1, 40), data=st.data())
    def reserve(self, n: int, data: st.DataObject) -> None:
        spare = self.spared(data)
        evictable = self.evictable(spare)
        before = len(self.dropped)
        try:
            self.pool.reserve(n, spare)
        except NoSequence:
            assert self.dropped[before:] == evictable  # everything was tried
            assert self.pool.cells + n > self.pool.n_cells
        else:
            assert self.pool.cells + n <= self.pool.n_cells
        for seq in self.dropped[before:]:
            self.forget(seq)
            self.used(seq)

    @invariant()
    def counts_agree_with_a_recount(self) -> None:
        if not hasattr(self, "pool"):
            return
        distinct = {id(copy): path for copies in self.copies.values() for path, copy in copies.items()}
        assert self.pool.cells == sum(ITEMS[path[-1]].n_tokens for path in distinct.values())
        for seq in range(self.n):
            path = self.held.get(seq, ())
            tip = self.pool.tip(seq)
            assert tip is (walk(self.tree, path) if path else None)
            for node in tip.path() if tip else []:
                expected = {s for s, other in self.held.items() if walk(self.tree, other) in self.below(node)}
                assert node.holders == expected
        assert self.pool.in_use() == len({s for s, n in self.pins.items() if n} | set(self.owners))
        assert self.pool.peak_cells >= self.pool.cells

    def below(self, node: Node) -> list[Node]:
        """The tips whose path runs through a node."""
        return [t for s in self.held if (t := walk(self.tree, self.held[s])) and node in list(t.up())]


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestPool = PoolMachine.TestCase
