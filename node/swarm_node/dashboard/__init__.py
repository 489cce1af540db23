"""The public, read-only views of a swarm: pages for people, a JSON API, live events, a bounded history.

`collector` polls signed records, `view_builder` makes `views` of them, and `run_follower` asks runs' members. `history`
keeps what was seen. `api` serves the views under `/api/v1`, `live` as events, `pages` as HTML. A browser gets nothing
that the API does not give.
"""
