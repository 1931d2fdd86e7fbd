"""Training: batch schedule, packing, the trainer protocol and its implementations."""
