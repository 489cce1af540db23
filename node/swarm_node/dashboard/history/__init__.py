"""The dashboard's history: presence of nodes, numbers over time, committed steps, refusals and changes.

`history` records and reads without blocking the event loop. `writer` is the thread that writes, through `recorder`,
which defines what is recorded. `reader` reads views, and `retention` deletes old rows. `store` is the database and
`schema` its tables.
"""
