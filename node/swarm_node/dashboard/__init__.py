"""The public, read-only views of a swarm: pages for people, a JSON API, live events, and a bounded history.

`collector` polls signed records, `view_builder` turns them into `views`, and `run_follower` asks the members of runs.
`history` keeps what was seen. `api` serves the views under `/api/v1`, `live` serves events and `pages` HTML. A browser
gets nothing that the API does not provide.
"""
