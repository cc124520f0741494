"""Graphs of jobs and of groups: nodes, their tags, shapes, stored values and lowered sites."""
