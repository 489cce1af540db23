"""The dashboard's history: who was there, numbers over time, committed steps, refusals, changes.

`history` records and reads without ever blocking the event loop: `writer` is the thread that writes, through
`recorder`, which defines what is recorded; `reader` reads views; `retention` forgets. `store` is the database, `schema`
its tables.
"""
