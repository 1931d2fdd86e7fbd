"""Generation: engines, rewards, filters, evaluation."""
