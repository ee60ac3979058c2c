"""The calls that all ranks have made so far, and the next one that they imply."""

from __future__ import annotations

Call = tuple[str, str]  # kind, digest of its collective sequence

LONG = 128  # calls of context that tell one place of a training loop from another
SHORT = (8, 1)  # shorter contexts, asked where the long one is new
MAX_NODES = 4096


class _Node:
    """One place in the loop: the last calls, what followed them the last time, and the place that follows."""

    __slots__ = ("context", "expected", "following")

    def __init__(self, context: tuple[Call, ...]) -> None:
        self.context = context
        self.expected: Call | None = None
        self.following: _Node = self


class History:
    """Predicts the next call from the calls so far.

    The prediction is a pure function of the calls recorded, so ranks with the same history predict the same call. A rank
    whose next call is the predicted one may go on alone: either every rank makes that call too, or the rank that does
    not knows that it deviates. A loop that repeats (any pattern up to 128 calls long) is predicted without an error
    from its second or third round on.
    """

    def __init__(self) -> None:
        self._node = _Node(())
        self._nodes: dict[tuple[Call, ...], _Node] = {(): self._node}
        self._short: dict[tuple[Call, ...], Call] = {}

    def follow(self, call: Call) -> bool:
        """Record ``call`` if this exact place has seen it before (about 0.1 us); False, and nothing done, otherwise."""
        node = self._node
        if node.expected == call:
            self._node = node.following
            return True
        return False

    def prediction(self) -> Call | None:
        """The call that the history implies, None where it implies nothing."""
        node = self._node
        if node.expected is not None:
            return node.expected
        for length in SHORT:
            guess = self._short.get(node.context[-length:])
            if guess is not None:
                return guess
        return None

    def record(self, call: Call) -> None:
        """Add ``call``, which all ranks are known to make, and learn from it."""
        node = self._node
        for length in SHORT:
            self._short[node.context[-length:]] = call
        context = (*node.context, call)[-LONG:]
        if len(self._nodes) >= MAX_NODES:
            self._nodes.clear()
            self._short.clear()
        following = self._nodes.setdefault(context, _Node(context))
        node.expected, node.following = call, following
        self._node = following
