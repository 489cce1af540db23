"""The parts that the gateway and the dashboard share as HTTP servers: the server, errors, addresses, rates, event
streams."""
