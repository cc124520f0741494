"""Conversations of a row, as a chat template writes them, and which of their characters train."""
