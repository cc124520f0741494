"""Training that clients drive request by request: a durable log of commands, and who runs it."""
