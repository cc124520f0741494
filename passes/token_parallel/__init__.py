"""Rules of which operators work on each token by itself, and the pass that checks them."""
