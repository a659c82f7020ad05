from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import yaml
from fake_scheduler import serving_fake
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[1] / "deploy"


def expressions():
    """Every query of the dashboard and the alerts."""
    dashboard = json.loads((DEPLOY / "grafana_dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    return found + [rule["expr"] for rule in rules]


def test_the_dashboard_and_the_alerts_ask_only_for_metrics_and_labels_that_exist(tmp_path):
    async def scenario():
        async with serving_fake(tmp_path) as http:
            await http.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}})
            text = (await http.get("/metrics"))[1]
        labels: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
        asked = expressions()
        assert len(asked) > 20
        for expression in asked:
            for name in re.findall(r"(?:sglang|regather):\w+", expression):
                assert name in labels, (name, expression)
            names = re.findall(r"(?:sglang|regather):\w+", expression)
            known = {"instance"}.union(*(labels[name] for name in names))
            grouped = re.findall(r"\b(?:by|ignoring) \(?([\w, ]+)\)", expression)
            used = {word for group in grouped for word in re.split(r",\s*", group)}
            used |= set(re.findall(r"(\w+)=~?\"", expression)) - {"job"}
            assert used <= known, (used - known, expression)

    asyncio.run(scenario())


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    assert {"RetractionStorm", "QueueIsOld", "LoopIsStuck"} <= {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_panels_do_not_cover_each_other():
    panels = json.loads((DEPLOY / "grafana_dashboard.json").read_text())["panels"]
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24 and (x, y) not in cells
                cells.add((x, y))
