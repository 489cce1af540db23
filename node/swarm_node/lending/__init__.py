"""Decides when a node lends its machine: by `hours` of the day, and by its traffic of the month."""
