"""Options as a tree of tokens: their probabilities need logits only where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


class Trie:
    """Token runs of the options of one choice.

    An option that is the beginning of another ("1" of "10") ends with ``end`` there, so that it can lose.

    Raises:
        ValueError: Two options are the same tokens.
    """

    def __init__(self, runs: Sequence[tuple[int, ...]], end: int) -> None:
        if not runs or len(set(runs)) != len(runs):
            raise ValueError("options must be one or more, and differ in their tokens")
        self._runs = [
            (*run, end) if any(len(o) > len(run) and o[: len(run)] == run for o in runs) else run for run in runs
        ]
        children: dict[tuple[int, ...], dict[int, None]] = {}
        for run in self._runs:
            for i, token in enumerate(run):
                children.setdefault(run[:i], {})[token] = None
        self._children = {path: tuple(tokens) for path, tokens in children.items()}

    def runs(self) -> list[tuple[tuple[int, ...], dict[int, tuple[int, ...]]]]:
        """Paths to evaluate, and for each the token ids whose logits are wanted after its first n tokens.

        Every place where options part lies on one of the paths.
        """
        parting = [path for path, tokens in self._children.items() if len(tokens) > 1]
        deepest = [p for p in parting if not any(len(o) > len(p) and o[: len(p)] == p for o in parting)]
        # One run even where nothing parts, so that the prompt itself is evaluated.
        out: list[tuple[tuple[int, ...], dict[int, tuple[int, ...]]]] = []
        for path in deepest or [()]:
            wanted = {
                n: self._children[path[:n]] for n in range(len(path) + 1) if len(self._children.get(path[:n], ())) > 1
            }
            out.append((path, wanted or {0: self._children[()]}))
        return out

    def scores(self, collected: Mapping[tuple[int, ...], Mapping[int, NDArray[np.float32]]]) -> NDArray[np.float64]:
        """float64 (n,) log-probability of each option among the options, from the logits of :meth:`runs`."""
        logits: dict[tuple[int, ...], NDArray[np.float32]] = {}
        for path, found in collected.items():
            for n, values in found.items():
                logits[path[:n]] = values
        out = np.zeros(len(self._runs))
        for i, run in enumerate(self._runs):
            for n, token in enumerate(run):
                children = self._children[run[:n]]
                if len(children) > 1:
                    x = logits[run[:n]].astype(np.float64)
                    x -= x.max()
                    out[i] += x[children.index(token)] - np.log(np.exp(x).sum())
        return out
