"""The Tinker API: routes that append to the command log and read answers from it."""
