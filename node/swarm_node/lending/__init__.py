"""Decides when a node lends its machine: `hours` of the day, `monthly_traffic` of the link, and `lending`, which keeps
both."""
