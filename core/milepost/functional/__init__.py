"""Pure functions: ratios, KL estimators, clipping, advantages, whitening, aggregation."""
