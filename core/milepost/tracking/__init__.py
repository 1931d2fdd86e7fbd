"""Where metrics go: stdout, JSON lines, W&B, TensorBoard; and what each metric means."""
