"""Exports what a daemon measures to its operator's tools: metrics for Prometheus, and traces for OpenTelemetry.

`metric_contract` names every metric and says when it changes. `metric_registry` holds the values of one daemon,
`readings` fills them, and `exporter` serves them; the gateway has metrics of its own. `otel_traces` turns finished
requests and rounds into spans.
"""
