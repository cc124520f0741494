"""Jobs together and alone: what `verify` compares."""
