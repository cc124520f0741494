"""Two passes for tlora-fx, in a package of their own."""
