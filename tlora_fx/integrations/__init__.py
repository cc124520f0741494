"""Parts that other training libraries need, to train with tlora-fx."""
