"""The containers, by reading: who may connect, who runs, where secrets come from.  Nothing is built here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCKER = Path(__file__).parents[1] / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = sorted(COMPOSE["services"])
STEPS = re.findall(r"^([A-Z]+) (.*)$", (DOCKER / "Dockerfile").read_text().replace("\\\n", " "), re.MULTILINE)


@pytest.mark.parametrize("name", SERVICES)
def test_services(name: str) -> None:
    service = COMPOSE["services"][name]
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:")
    assert service["user"] not in ("root", "0", 0) and not str(service["user"]).startswith("0:")
    assert not service.get("privileged") and service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service.get("network_mode") != "host" and not any("docker.sock" in item for item in service["volumes"])
    if service.get("ports"):
        check = service["healthcheck"]
        port = service["ports"][0].rpartition(":")[2]
        assert check["test"][0] == "CMD" and f":{port}/health" in check["test"][-1]
    for other, how in service.get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"} and not COMPOSE["services"][other]["healthcheck"].get("disable")


@pytest.mark.parametrize("name", SERVICES)
def test_secrets_come_from_outside(name: str) -> None:
    for variable, value in COMPOSE["services"][name].get("environment", {}).items():
        if re.search("PASSWORD|TOKEN|SECRET|KEY|USERNAME", variable):
            assert value is None  # compose passes on what its own environment has
        assert not re.search(r"://[^/${}]*:[^/${}]*@", str(value))


def test_the_image_runs_as_nobody_of_rank_and_holds_no_secret() -> None:
    order = [step for step, _ in STEPS]
    assert order.count("FROM") == 1 and dict(STEPS)["FROM"].partition(":")[2] not in ("", "latest")
    assert [who for step, who in STEPS if step == "USER"][-1] == "lab"
    assert order.index("USER") > max(index for index, step in enumerate(order) if step in ("COPY", "RUN"))
    assert not {"ADD", "ENV", "ARG"} & set(order)
    copied = [source for step, text in STEPS if step == "COPY" for source in text.split()[:-1]]
    assert all((DOCKER.parent / source).exists() for source in copied) and "." not in copied
    assert all("-c constraints.txt" in text for step, text in STEPS if step == "RUN" and "pip install" in text)


def test_what_the_readme_says_is_there() -> None:
    text = (DOCKER / "README.md").read_text()
    command = re.search(r"docker compose -f (\S+) run --rm (\w+) run (\S+)", text)
    assert command is not None and command[2] in SERVICES
    assert (DOCKER.parent / command[1]).exists() and (DOCKER.parent / command[3]).exists()
    for variable in re.findall(r"`(MLFLOW_\w+)`", text):
        assert variable in COMPOSE["services"]["lab"]["environment"]
