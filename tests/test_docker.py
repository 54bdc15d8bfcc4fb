"""Tests of the container files by reading: network access, users, secrets.  Nothing is built.

Two of the file's services run here as processes, where PostgreSQL is installed: ``benchmarks/tracking.py``.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = sorted(COMPOSE["services"])
STEPS = re.findall(r"^([A-Z]+) (.*)$", (DOCKER / "Dockerfile").read_text().replace("\\\n", " "), re.MULTILINE)
KEYS = {
    *("image", "build", "user", "cap_drop", "security_opt", "volumes", "environment", "depends_on", "healthcheck"),
    *("entrypoint", "command", "ports", "restart", "init", "profiles", "shm_size", "deploy"),
}
"""What the services use of what compose knows."""


@pytest.mark.parametrize("name", SERVICES)
def test_services(name: str) -> None:
    service = COMPOSE["services"][name]
    assert set(service) <= KEYS and ("image" in service or "build" in service)
    for port in service.get("ports", []):
        assert port.startswith("${BIND:-127.0.0.1}:")
    assert service["user"] not in ("root", "0", 0) and not str(service["user"]).startswith("0:")
    assert not service.get("privileged") and service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service.get("network_mode") != "host" and "docker.sock" not in str(service)
    for volume in service.get("volumes", []):
        source = volume.partition(":")[0]
        assert source == ".." or source in COMPOSE["volumes"]
    if "build" not in service:
        assert service["image"].rpartition(":")[2] not in ("", "latest") and ":" in service["image"]


@pytest.mark.parametrize("name", SERVICES)
def test_dependencies_have_health_checks(name: str) -> None:
    service = COMPOSE["services"][name]
    for other, how in service.get("depends_on", {}).items():
        dependencies = COMPOSE["services"][other]
        ends = how == {"condition": "service_completed_successfully"}
        assert ends or how == {"condition": "service_healthy"}
        assert bool(dependencies["healthcheck"].get("disable")) == ends and ("restart" in dependencies) == (not ends)
        assert set(dependencies.get("profiles", [])) <= set(service.get("profiles", []))
    if service.get("ports"):
        port = service["ports"][0].rpartition(":")[2]
        assert f":{port}/health" in service["healthcheck"]["test"][-1] and port in service["entrypoint"]
    check = service["healthcheck"]
    assert check.get("disable") or (check["test"][0] == "CMD" and check["retries"] and check["timeout"])


@pytest.mark.parametrize("name", SERVICES)
def test_secrets_come_from_outside(name: str) -> None:
    for variable, value in COMPOSE["services"][name].get("environment", {}).items():
        if re.search("PASSWORD|TOKEN|SECRET|USERNAME", variable):
            assert value is None or re.fullmatch(r"\$\{\w+:\?[^}]*\}", value), variable
        assert not re.search(r"://[^/${}]*:[^/${}]*@", str(value))


def test_image_runs_unprivileged_without_secrets() -> None:
    order = [step for step, _ in STEPS]
    assert order.count("FROM") == 1 and re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", dict(STEPS)["FROM"])
    assert [who for step, who in STEPS if step == "USER"][-1] == "lab"
    assert order.index("USER") > max(index for index, step in enumerate(order) if step in ("COPY", "RUN"))
    assert not {"ADD", "ENV"} & set(order) and [text for step, text in STEPS if step == "ARG"] == [
        "WHEELS=https://download.pytorch.org/whl/cpu"
    ]
    copied = [source for step, text in STEPS if step == "COPY" for source in text.split()[:-1]]
    assert all((ROOT / source).exists() for source in copied) and "." not in copied
    assert copied[-1] == "vitlab", "what changes most comes last, so that the layers before it stay"
    assert all("-c constraints.txt" in text for step, text in STEPS if step == "RUN" and "pip install" in text)


def test_image_installs_requirements_of_services(tmp_path: Path) -> None:
    """Run the step that reads pyproject.toml."""
    [step] = [text for kind, text in STEPS if kind == "RUN" and "tomllib" in text]
    command = step.partition("&&")[0].replace("needed.txt", str(tmp_path / "needed.txt"))
    subprocess.run(["sh", "-c", command], cwd=ROOT, check=True)
    requirements = (tmp_path / "needed.txt").read_text().split("\n")
    names = {re.split(r"[\[<>=~ ]", line)[0] for line in requirements if line}
    assert {"torch", "mlflow", "ray", "psycopg", "boto3"} <= names
    pins = dict(re.findall(r"^([\w.\-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {"psycopg", "psycopg-binary", "boto3", "botocore", "ray"} <= set(pins)


def test_one_command_starts_services_and_keeps_passwords(tmp_path: Path) -> None:
    """Use a ``docker`` that prints its arguments."""
    (tmp_path / "docker").write_text((DOCKER / "start").read_text())
    (tmp_path / "bin").mkdir()
    engine = tmp_path / "bin" / "docker"
    engine.write_text('#!/bin/sh\necho "$LAB_USER"\nfor word in "$@"; do echo "$word"; done\n')
    engine.chmod(0o755)
    home = tmp_path / "checkout"
    home.mkdir()
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    environment.pop("LAB_USER", None)

    def docker_calls(*words: str) -> list[str]:
        start = home / "start"
        start.write_text((DOCKER / "start").read_text())
        done = subprocess.run(["sh", str(start), *words], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    file = "pipelines/quickstart.yaml"
    user, *words = docker_calls("run", file, "--set", "seeds=2 ")
    assert user == f"{os.getuid()}:{os.getgid()}"
    assert words[:3] == ["compose", "-f", f"{home}/compose.yaml"]
    assert words[3:] == ["run", "--rm", "lab", "run", file, "--set", "seeds=2 "]
    passwords = (home / ".env").read_text()
    assert stat.S_IMODE((home / ".env").stat().st_mode) == 0o600
    secrets = dict(line.split("=") for line in passwords.splitlines())
    expected = set(re.findall(r"\$\{(\w+):\?", (DOCKER / "compose.yaml").read_text()))
    assert set(secrets) == expected and len({*secrets.values()}) == len(expected)
    assert all(len(value) == 48 for value in secrets.values())
    _, *words = docker_calls("ray", "run", file)
    assert "lab-ray" in words and words[words.index("--profile") + 1] == "ray"
    assert words[-1] == "run.executor={type: ray, address: auto, files: shared}" and words[-4:-2] == ["run", file]
    docker_calls("ray", "status", file)
    assert docker_calls("server")[-1] == "mlflow"
    assert (home / ".env").read_text() == passwords
    assert "docker/.env" in (ROOT / ".gitignore").read_text().split()


def test_readme_names_existing_commands_and_services() -> None:
    text = (DOCKER / "README.md").read_text()
    for command, study in re.findall(r"^(docker/\S+)(?: ray)? run (\S+)$", text, re.MULTILINE):
        assert os.access(ROOT / command, os.X_OK) and (ROOT / study).exists()
    for service in re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE):
        assert service in SERVICES
    for variable in re.findall(r"`([A-Z_]+)`", text):
        assert variable in (DOCKER / "compose.yaml").read_text() + (DOCKER / "Dockerfile").read_text()


def test_build_context_has_only_copied_files() -> None:
    """Results, secrets and history of a checkout are not sent to the builder."""
    copied = {word for step, words in STEPS if step == "COPY" for word in words.split()[:-1]}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*" and {line[1:] for line in lines if line.startswith("!")} == copied
    assert "**/__pycache__" in lines and all((ROOT / name).exists() for name in copied)
