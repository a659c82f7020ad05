"""Parts that models are built from, and attention backends."""
