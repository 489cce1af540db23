"""What the dashboard remembers: who was there, numbers over time, committed steps, refusals, what happened.

`facts` are what is recorded; `history` takes and gives them without ever holding up the event loop; `store` is the
database; `migrations` its schema through time. Nothing here looks at the network.
"""
