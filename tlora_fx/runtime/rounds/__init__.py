"""Work of a run around its rounds: jobs come and go, are evaluated, and are kept."""
