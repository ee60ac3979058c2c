"""What ranks tell each other outside of collectives: one text each, read by all."""

from __future__ import annotations

import threading
import time

from zcompile.errors import RankError, RankTimeoutError
from zcompile.runtime.ranks.agreement import FAREWELL, SLICE, Agreement
from zcompile.runtime.ranks.board import Board, Vote


def exchange(agreement: Agreement, topic: str, text: str, *, background: bool = False) -> list[str]:
    """Every rank's text for ``topic``, by rank, over the store.

    Args:
        agreement: of the model.
        topic: used once in the life of the model, the same on every rank.
        text: what this rank has to say.
        background: called beside the thread that trains: the wait also ends when this rank leaves.

    Raises:
        RankError: another rank failed, is gone or left.
        RankTimeoutError: a rank did not come within the agreement's timeout.
    """
    board = agreement.board
    if board is None:
        return [text]
    agreement.check()
    key = f"exchange/{topic}"
    vote = board.publish(key, text)
    if not background or not _wait(agreement, board, vote, topic):
        agreement.poll(f"all ranks to come to {topic}", vote.done.wait, topic=key)
    texts = board.ask(lambda _: board.texts(key))
    if texts is None:
        raise RankError(f"{_head(agreement)} read what the others said to {topic} when {board.keeper} was gone")
    if agreement.rank == 0 and board.host:  # the store may end with this process: let the others read
        deadline = time.monotonic() + FAREWELL
        while time.monotonic() < deadline and board.ask(lambda _: board.all_have_read(key)) is False:
            if board.failure is not None:  # a rank that is gone will not
                break
            time.sleep(0.005)
        board.submit(lambda store: store.delete_key(f"{key}/read"))
    return texts


def _wait(agreement: Agreement, board: Board, vote: Vote, topic: str) -> bool:
    """Wait beside the thread that trains; False when the program has ended, so that nobody else waits for the ranks."""
    begin = time.monotonic()
    agreement.beside = agreement.device_wait(f"all ranks to come to {topic}", 0, begin)  # asks where the others are
    try:
        return _is_done(agreement, board, vote, topic, begin + agreement.timeout)
    finally:
        agreement.beside = None


def _is_done(agreement: Agreement, board: Board, vote: Vote, topic: str, deadline: float) -> bool:
    while not vote.done.wait(SLICE):
        agreement.check()
        if not threading.main_thread().is_alive():
            return False
        if board.lost or agreement.is_closed:
            why = f"{board.keeper} is gone ({board.lost})" if board.lost else "this rank has left"
            raise RankError(f"{_head(agreement)} stops waiting for all ranks to come to {topic}: {why}")
        if time.monotonic() > deadline:
            raise RankTimeoutError(
                f"{_head(agreement)} waits for all ranks to come to {topic} since {agreement.timeout:.0f} s; "
                "find out why, or pass a longer timeout"
            )
    return True


def _head(agreement: Agreement) -> str:
    return f"[rank {agreement.rank} of {agreement.world_size}] rank {agreement.rank}"
