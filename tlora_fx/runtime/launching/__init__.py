"""Start the processes of a run: what they are told, and what is checked before."""
