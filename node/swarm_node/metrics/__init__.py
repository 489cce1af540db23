"""What a daemon tells its operator's tools: metrics for Prometheus, and traces for OpenTelemetry.

`contract` names every metric and says when it moves, `registry` holds the values of one daemon, `endpoint` serves them.
`of_node`, `of_server` and `of_trainer` fill them, mostly at the moment somebody reads; the gateway has its own.
`traces` turns finished requests and rounds into spans.
"""
