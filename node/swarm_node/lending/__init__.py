"""Decides when a node lends its machine: by the `hours` of the day, and by the traffic of the month that it counts."""
