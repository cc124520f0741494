"""Search of policies: what a group is worth, which moves there are, where it fits."""
