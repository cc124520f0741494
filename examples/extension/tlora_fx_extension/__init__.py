"""Passes, an operator, a policy and a planner for tlora-fx, in a package of their own."""
