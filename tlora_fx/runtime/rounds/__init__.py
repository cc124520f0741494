"""What a run does around its rounds: jobs come and go, are evaluated, and are kept."""
