"""The service over a run: an HTTP API and metrics, beside the same loop and ledger."""
