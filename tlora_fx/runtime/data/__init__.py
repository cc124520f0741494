"""From the rows of a file to the batches of a round."""
