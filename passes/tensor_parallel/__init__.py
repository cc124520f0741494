"""Rules of how operators are cut over tp, and the pass that cuts them."""
