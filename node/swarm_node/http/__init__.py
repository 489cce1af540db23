"""The gateway and the dashboard share this as HTTP servers: the server, errors, addresses, rate limits and event
streams."""
