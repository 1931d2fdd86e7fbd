"""Pure functions: ratios, KL estimators, clipping, advantages, whitening, aggregation.

Each module is one topic and can be read beside its paper. All tensors are flat: [N] has one entry per token of S
samples laid end to end, [S] one per sample.
"""
