"""What is told of jobs: to callbacks and trackers, in folders and tables."""
