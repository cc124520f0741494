"""Reports on jobs: to callbacks and trackers, in folders and tables."""
