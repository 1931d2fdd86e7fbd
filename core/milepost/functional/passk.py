"""pass@k: how likely is at least one of k responses correct?"""

from __future__ import annotations

from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n samples of one prompt, c of them correct.

    1 - C(n - c, k) / C(n, k): the share of the k-subsets of the samples that hold a correct one. Plain
    1 - (1 - c/n)^k would be biased low. Computed in integers and divided once, so the result is correctly rounded.

    Source: arXiv 2107.03374, equation 1.

    Args:
        num_samples: n, samples drawn for the prompt.
        num_correct: c, correct ones among them; 0 <= c <= n.
        k: responses allowed; 1 <= k <= n.

    Returns:
        The estimate, between 0 and 1.

    Raises:
        ValueError: if c or k is out of range.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct is {num_correct}, expected 0 to num_samples = {num_samples}")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}, expected 1 to num_samples = {num_samples}; draw more samples per prompt")
    subsets = comb(num_samples, k)
    return (subsets - comb(num_samples - num_correct, k)) / subsets
