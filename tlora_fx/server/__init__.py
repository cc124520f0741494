"""The service over a run: an HTTP API, a page and metrics, beside the same loop and ledger."""
