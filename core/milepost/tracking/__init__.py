"""Where metrics go: stdout, JSON lines, W&B, TensorBoard; and what each metric means."""

from milepost.tracking.tracker import Tracker

__all__ = ["Tracker"]
