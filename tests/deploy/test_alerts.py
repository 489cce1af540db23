"""Each alert fires in time when there is what it describes, and says what to do; and none fires on a healthy swarm."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.deploy_commands import DEPLOY, text
from swarm.network.relay.relay import RelayLimits
from swarm.serving.engine.engine import EngineOptions

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: the alerts were only read"
)
RULES = DEPLOY / "prometheus" / "rules.yml"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load(text("prometheus/rules.yml"))["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
IDLE = "swarm_node_state{state='idle'}"
TRAINING = "swarm_node_state{state='training'}"
COMMITTED = "swarm_trainer_rounds_total{result='committed'}"
ABORTED = "swarm_trainer_rounds_total{result='aborted'}"
STEP, OF = "swarm_trainer_outer_step", "swarm_trainer_num_outer_steps"
CACHE, SESSIONS = "swarm_server_kv_cache_usage_perc", "swarm_server_num_sessions"
BUSY = "swarm_server_refusals_total{reason='busy'}"
REFUSED = "swarm_relay_refusals_total{reason='refused'}"
RESERVATIONS, CIRCUITS = "swarm_relay_num_reservations", "swarm_relay_num_circuits"
RELAYED = "swarm_network_sent_bytes_total{peer='relayed'}"
DIRECT = "swarm_network_sent_bytes_total{peer='direct'}"
WITHIN_8S = "swarm_gateway_time_to_first_token_seconds_bucket{le='8'}"
WITHIN_15S = "swarm_gateway_time_to_first_token_seconds_bucket{le='15'}"
ANY_TIME = "swarm_gateway_time_to_first_token_seconds_bucket{le='+Inf'}"
ANSWERED = "swarm_gateway_http_requests_total{route='/v1/completions',status='200'}"
FAILED = "swarm_gateway_http_requests_total{route='/v1/completions',status='503'}"
FULL = "swarm_gateway_http_requests_total{route='/v1/completions',status='429'}"
TOO_FAST = "swarm_gateway_http_requests_total{route='other',status='429'}"
WELL = "swarm_gateway_http_requests_total{route='/health',status='200'}"
UNWELL = "swarm_gateway_http_requests_total{route='/health',status='503'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The `series` of the daemon "one", a value a minute in promtool's notation: the alert fires in minute `firing`,
    with these `labels` beside its severity, and not in minute `quiet`."""

    alert: str
    series: Mapping[str, str]
    quiet: int
    firing: int
    labels: Mapping[str, str] = field(default_factory=lambda: {"instance": "one"})


FAULTS = [
    Fault(
        alert="SwarmDaemonDown",
        series={"up{job='swarm'}": "1x5 0x10"},
        quiet=7,
        firing=9,
        labels={"instance": "one", "job": "swarm"},
    ),
    Fault(
        alert="SwarmNodeNotJoined",
        series={"swarm_node_num_peers": "0x20"},
        quiet=4,
        firing=6,
    ),
    Fault(
        alert="SwarmNodeAlone",
        series={"swarm_node_num_peers": "3x5 1x20", "swarm_membership_publish_failures_total": "0x5 1+1x20"},
        quiet=10,
        firing=13,
    ),
    Fault(
        alert="SwarmRecordsRefused",
        series={"swarm_dht_records_refused_total": "0x5 10+10x30"},
        quiet=14,
        firing=25,
    ),
    Fault(
        alert="SwarmOpenFilesShort",
        series={"process_open_fds{job='swarm'}": "100x5 900x20", "process_max_fds{job='swarm'}": "1024x25"},
        quiet=10,
        firing=12,
        labels={"instance": "one", "job": "swarm"},
    ),
    Fault(
        alert="SwarmRelayFull",
        series={REFUSED: "0x5 6+6x30", RESERVATIONS: "100x5 256x30", CIRCUITS: "9x35"},
        quiet=14,
        firing=25,
        labels={"instance": "one", "reason": "refused"},
    ),
    Fault(
        alert="SwarmRelayFull",
        series={REFUSED: "0x5 6+6x30", RESERVATIONS: "100x35", CIRCUITS: "9x5 _ 250 256 240 256x27"},
        quiet=14,
        firing=25,
        labels={"instance": "one", "reason": "refused"},
    ),
    Fault(
        alert="SwarmMostlyRelayed",
        series={RELAYED: "0+6000000x200", DIRECT: "0+1000000x200"},
        quiet=80,
        firing=100,
    ),
    Fault(  # sessions end and leave room for a moment
        alert="SwarmServerCacheFull",
        series={
            CACHE: "0.1x5 0.94 0.6 0.94 0.6 0.94 0.6 0.94 0.6 0.94 0.6 0.94 0.6 0.94 0.6 0.94x9",
            BUSY: "0x5 1+5x20",
        },
        quiet=14,
        firing=20,
    ),
    Fault(  # short sessions in a large cache
        alert="SwarmServerCacheFull",
        series={CACHE: "0.1x25", SESSIONS: "9x5 64x20", BUSY: "0x5 1+5x20"},
        quiet=14,
        firing=20,
    ),
    Fault(
        alert="SwarmServersLost",
        series={"swarm_gateway_reroutes_total{how='replay'}": "0x5 2+2x20"},
        quiet=9,
        firing=12,
        labels={},
    ),
    Fault(
        alert="SwarmFirstTokenSlow",
        series={WITHIN_8S: "0+20x5 100x20", WITHIN_15S: "0+20x25", ANY_TIME: "0+20x25"},
        quiet=14,
        firing=18,
        labels={},
    ),
    Fault(
        alert="SwarmGatewayFailing",
        series={ANSWERED: "0+9x30", FAILED: "0x5 1+1x25", WELL: "0+60x30"},
        quiet=9,
        firing=14,
    ),
    Fault(
        alert="SwarmGatewayFailing",
        series={ANSWERED: "0+9x30", FULL: "0x5 1+1x25"},
        quiet=9,
        firing=14,
    ),
    Fault(  # the last step is committed in minute 20, and half an hour later the alert says so
        alert="SwarmRunStalled",
        series={COMMITTED: "1+1x20 21x60", STEP: "1+1x20 21x60", OF: "100x80", TRAINING: "1x80"},
        quiet=47,
        firing=53,
        labels={"instance": "one", "result": "committed"},
    ),
    Fault(
        alert="SwarmRoundsAbort",
        series={ABORTED: "0x5 1+1x30", COMMITTED: "0+2x40"},
        quiet=14,
        firing=18,
    ),
    Fault(  # a run that waits
        alert="SwarmRoundsAbort",
        series={ABORTED: "0x5 6+6x30", COMMITTED: "7x40"},
        quiet=5,
        firing=9,
    ),
    Fault(
        alert="SwarmDigestMismatch",
        series={"swarm_trainer_digest_mismatches_total": "0x5 1x20"},
        quiet=4,
        firing=7,
    ),
]

HEALTHY = {
    "a new network's seed has others": {
        "swarm_node_num_peers": "1 2x40",
        "swarm_membership_publish_failures_total": "3x40",
    },
    "peers look for others that have left a relay": {REFUSED: "0+60x40", RESERVATIONS: "100x40", CIRCUITS: "40x40"},
    "a few small messages go through a relay": {RELAYED: "0+600000x200", DIRECT: "0x200"},
    "most goes directly": {RELAYED: "0+6000000x200", DIRECT: "0+9000000x200"},
    "a busy server sends a client to another one now and then": {CACHE: "0.9x40", SESSIONS: "64x40", BUSY: "0+1x40"},
    "a server refuses what it has room for": {CACHE: "0.3x40", SESSIONS: "20x40", BUSY: "0+9x40"},
    "a gateway has no requests": {
        WITHIN_8S: "9x40",
        WITHIN_15S: "9x40",
        ANY_TIME: "9x40",
        ANSWERED: "9x40",
        FAILED: "9x40",
    },
    "a load balancer asks a gateway without models": {UNWELL: "0+12x40", ANSWERED: "9x40", FAILED: "9x40"},
    "a caller asks a gateway too often": {ANSWERED: "0+9x40", TOO_FAST: "0+9x40"},
    "a volunteer trains at other hours": {
        COMMITTED: "21x80",
        STEP: "21x80",
        OF: "100x80",
        IDLE: "0x80",
        TRAINING: "0x80",
    },
    "a run has ended": {COMMITTED: "100x80", STEP: "100x80", OF: "100x80", TRAINING: "1x80"},
    "volunteers of a fast run come and go": {ABORTED: "0+1x80", COMMITTED: "0+30x80", STEP: "1+30x80", OF: "9000x80"},
}


def run_promtool(folder: Path, series: Mapping[str, str], tests: list[dict[str, Any]]) -> None:
    """Run alert tests on the series of the daemon "one"."""
    named = [
        {
            "series": f"{name[:-1]},instance='one'}}" if name.endswith("}") else f"{name}{{instance='one'}}",
            "values": values,
        }
        for name, values in series.items()
    ]
    file = folder / "alerts.yml"
    case = {"interval": "1m", "input_series": named, "alert_rule_test": tests}
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.alert)
def test_alert_fires_in_time(fault: Fault, tmp_path: Path) -> None:
    rule = ALERTS[fault.alert]
    annotations = {name: said.replace("{{ $labels.instance }}", "one") for name, said in rule["annotations"].items()}
    fired = {"exp_labels": {**rule["labels"], **fault.labels}, "exp_annotations": annotations}
    tests = [
        {"alertname": fault.alert, "eval_time": f"{fault.quiet}m"},
        {"alertname": fault.alert, "eval_time": f"{fault.firing}m", "exp_alerts": [fired]},
    ]
    run_promtool(tmp_path, fault.series, tests)


def test_each_alert_is_fired_here() -> None:
    assert {fault.alert for fault in FAULTS} == set(ALERTS)


@needs_promtool
@pytest.mark.parametrize("case", HEALTHY)
def test_no_alert_fires_on_a_healthy_swarm(case: str, tmp_path: Path) -> None:
    quiet = [{"alertname": alert, "eval_time": f"{minute}m"} for alert in ALERTS for minute in (15, 25, 38, 70, 130)]
    run_promtool(tmp_path, HEALTHY[case], quiet)


def test_alerts_say_what_and_what_now() -> None:
    for rule in ALERTS.values():
        assert set(rule["annotations"]) == {"summary", "remedy"}
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_alerts_know_what_a_relay_and_a_server_have_places_for() -> None:
    relay, server = RelayLimits(), EngineOptions()
    assert relay.reservations == relay.circuits == 256
    assert "> 240" in ALERTS["SwarmRelayFull"]["expr"]
    assert server.max_sessions == 64
    assert f"{SESSIONS}[5m]) > 60" in ALERTS["SwarmServerCacheFull"]["expr"]
