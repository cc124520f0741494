"""Adapters as files: PEFT folders, starting values, model cards, the Hub."""
