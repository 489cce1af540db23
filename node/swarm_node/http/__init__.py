"""What the gateway and the dashboard share as HTTP servers: the server, errors, addresses, rate limits and event
streams."""
