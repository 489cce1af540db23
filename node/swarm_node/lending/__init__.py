"""Decides when a node lends its machine: `hours` of the day, and `lending`, which also counts the month's traffic."""
