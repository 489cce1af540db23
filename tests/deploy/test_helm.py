"""The chart: its values are what its schema allows and its templates use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from support.deploy_commands import DEPLOY

CHART = DEPLOY / "helm" / "swarm"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text("utf-8"))
TEMPLATES = "\n".join(path.read_text("utf-8") for path in sorted((CHART / "templates").iterdir()))
# what a user hands on as it is, whatever is in it
FREE = ("resources", "nodeSelector", "tolerations", "metricsFrom", "global")


def paths(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and name not in FREE:
            yield from paths(value, f"{above}{name}.")
        else:
            yield above + name


def declared(schema: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, entry in schema["properties"].items():
        found = SCHEMA["definitions"][entry["$ref"].split("/")[-1]] if "$ref" in entry else entry
        if "properties" in found and name not in FREE:
            assert found["additionalProperties"] is False, f"a misspelt value below {above}{name} would pass"
            assert set(found["required"]) == set(found["properties"])
            yield from declared(found, f"{above}{name}.")
        elif name != "global":
            yield above + name


def test_schema_and_values_name_the_same() -> None:
    assert SCHEMA["additionalProperties"] is False
    assert sorted(declared(SCHEMA)) == sorted(paths(VALUES))


def test_templates_use_every_value_and_no_other() -> None:
    used = set(re.findall(r"\.Values\.([\w.]+)", TEMPLATES))
    # the placement of a role is read by one template for all
    used |= {f"{role}.{name}" for role in ("seed", "nodes", "gateway") for name in ("nodeSelector", "tolerations")}
    assert used - {"seed", "nodes", "gateway"} == set(paths(VALUES))


def test_templates_include_what_is_defined_and_end_what_they_begin() -> None:
    assert set(re.findall(r'include "([\w.]+)"', TEMPLATES)) == set(re.findall(r'define "([\w.]+)"', TEMPLATES))
    begun = re.findall(r"\{\{-? (?:if|range|with|define) ", TEMPLATES)
    assert len(begun) == len(re.findall(r"\{\{-? end ", TEMPLATES))


def test_chart_says_what_it_is() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert (chart["apiVersion"], chart["name"]) == ("v2", "swarm")
