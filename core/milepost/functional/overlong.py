"""Overlong shaping: a soft penalty for responses near the length limit. Plain Python, one response at a time."""

from __future__ import annotations


def overlong_penalty(length: int, max_len: int, buffer: int, penalty: float = 1.0) -> float:
    """What is added to the reward of a response (DAPO, arXiv 2503.14476, equation 13), 0 or less.

    0 up to max_len - buffer tokens; from there (max_len - buffer - length) / buffer; -1 beyond max_len; all of it
    times `penalty`.

    Args:
        length: tokens of the response.
        max_len: the length limit.
        buffer: tokens below the limit over which the penalty rises, 1 to max_len.
        penalty: largest penalty, over 0.

    Raises:
        ValueError: the buffer is out of range.
    """
    if not 1 <= buffer <= max_len:
        raise ValueError(f"buffer is {buffer}, expected 1 to the length limit {max_len}")
    excess = length - (max_len - buffer)
    if excess <= 0:
        return 0.0
    return -penalty * min(excess / buffer, 1.0)
