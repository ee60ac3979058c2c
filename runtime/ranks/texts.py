"""Texts that ranks tell each other: of errors, and of a vote that failed, with its first difference."""

from __future__ import annotations

import time
from collections.abc import Callable

from zcompile.runtime.ranks.board import Board, Vote
from zcompile.runtime.ranks.judge import first_difference, name_ranks
from zcompile.runtime.ranks.sequence import digest_of

DETAILS = 10.0  # seconds to collect the texts that differ


def name_difference(
    board: Board, vote: Vote, lines: tuple[str, ...], headline: str, is_broken: Callable[[], bool]
) -> str:
    """``headline`` and the first line in which the first differing rank and rank 0 differ.

    Every rank of the vote calls this and posts its text, so all name the same difference.

    Args:
        board: where texts are posted.
        vote: the vote that failed.
        lines: this rank's text.
        headline: the start of the sentence.
        is_broken: whether another rank has posted its failure, after which it may post no text any more.
    """
    own_key = f"{vote.topic}/text/{board.rank}"
    board.submit(lambda store: store.set(own_key, "\n".join(lines)))
    texts = {board.rank: lines}
    deadline = time.monotonic() + DETAILS
    while time.monotonic() < deadline and not board.lost:
        for rank in [r for r in range(board.world_size) if r not in texts]:
            key = f"{vote.topic}/text/{rank}"
            text = board.ask(lambda store, key=key: store.get(key) if store.check([key]) else None)
            if text is not None:
                texts[rank] = tuple(text.decode().split("\n"))
        if len(texts) == board.world_size or (is_broken() and 0 in texts):
            break
        time.sleep(0.05)
    base = min(texts)
    digests = {rank: digest_of(text) for rank, text in texts.items()}
    differ = [rank for rank in sorted(texts) if digests[rank] != digests[base]]
    if not differ:
        return f"{headline}: another rank gave a different text"
    more = f" ({name_ranks(differ)} differ from rank {base})" if len(differ) > 1 else ""
    return headline + first_difference(differ[0], texts[differ[0]], base, texts[base]) + more


def describe(error: BaseException) -> str:
    """An error's class and first line, for other ranks."""
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first[:500]}" if first else type(error).__name__
