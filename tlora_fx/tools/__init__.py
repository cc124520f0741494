"""Tools to look at passes and graphs with."""
