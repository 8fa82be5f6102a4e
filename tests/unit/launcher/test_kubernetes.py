"""What can be checked of compose/kubernetes.yml without a cluster: its parts fit each other."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from pagefleet.command_line import parse
from pagefleet.settings import GatewaySettings, SchedulerSettings, WorkerSettings
from pagefleet_gateway.http.edge import OPEN_PATHS
from tests.unit.launcher.test_compose import SERVICES, instructions

FILE = Path(__file__).parents[3] / "compose/kubernetes.yml"
ITEMS = yaml.safe_load(FILE.read_text())["items"]
NAMED = {(item["kind"], item["metadata"]["name"]): item for item in ITEMS}
SETTINGS = {"gateway": GatewaySettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}


def pod(service):
    return NAMED["Deployment", f"pagefleet-{service}"]["spec"]["template"]["spec"]


def container(service):
    [only] = pod(service)["containers"]
    return only


def settings(service):
    return parse(SETTINGS[service], container(service)["args"], env={})


@pytest.mark.parametrize("service", SETTINGS)
def test_a_deployment_runs_its_own_pods_of_the_image_that_is_built(service):
    deployment = NAMED["Deployment", f"pagefleet-{service}"]["spec"]
    assert deployment["selector"]["matchLabels"] == deployment["template"]["metadata"]["labels"]
    assert container(service)["image"] == f"registry.example/pagefleet-{service}"
    assert "command" not in container(service)  # so that it is the image's own
    assert pod(service)["securityContext"]["runAsUser"] == 1000


@pytest.mark.parametrize("service", SETTINGS)
def test_what_is_mounted_is_there(service):
    volumes = {volume["name"]: volume for volume in pod(service)["volumes"]}
    for each in [*pod(service)["containers"], *pod(service).get("initContainers", [])]:
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes.keys()
    if "models" in volumes:
        claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
        assert ("PersistentVolumeClaim", claim) in NAMED
        folders = dict(instructions(f"Dockerfile.{service}"))["RUN"].split()
        assert "/models" in folders


def test_all_know_the_cell_s_key_by_the_name_that_the_secret_gives_it():
    [made] = re.findall(r"create secret generic (\S+) --from-file=(\S+)", FILE.read_text())
    for service in SETTINGS:
        [key] = [volume for volume in pod(service)["volumes"] if volume["name"] == "key"]
        [mount] = [m for m in container(service)["volumeMounts"] if m["name"] == "key"]
        assert (key["secret"]["secretName"], settings(service).cell_key) == (
            made[0],
            f"{mount['mountPath']}/{made[1]}",
        )
        assert key["secret"]["defaultMode"] == 0o400


@pytest.mark.parametrize("side", ["gateway", "worker"])
def test_the_scheduler_is_found_under_the_name_of_its_service(side):
    listening = urlsplit(getattr(settings("scheduler"), f"listen_{side}s"))
    assert listening.hostname == "0.0.0.0"
    told = urlsplit(getattr(settings(side), f"{side}_endpoint"))
    service = NAMED["Service", told.hostname]["spec"]
    labels = NAMED["Deployment", "pagefleet-scheduler"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"] == labels
    ports = {each["name"]: each["port"] for each in service["ports"]}
    assert ports[f"{side}s"] == told.port == listening.port
    assert {"containerPort": told.port} in container("scheduler")["ports"]


def test_there_are_never_two_schedulers():
    deployment = NAMED["Deployment", "pagefleet-scheduler"]["spec"]
    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}


def test_clients_reach_gateways_that_are_ready_and_end_when_their_streams_did():
    gateway, own = settings("gateway"), container("gateway")
    assert gateway.host == "0.0.0.0"
    [port] = NAMED["Service", "pagefleet"]["spec"]["ports"]
    assert port["targetPort"] == gateway.port
    assert own["ports"] == [{"containerPort": gateway.port}]
    for probe, path in (("readinessProbe", "/ready"), ("livenessProbe", "/live")):
        assert own[probe]["httpGet"] == {"path": path, "port": gateway.port}
        assert path in OPEN_PATHS
    before = own["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod("gateway")["terminationGracePeriodSeconds"] > before + gateway.shutdown_timeout


def test_models_are_prepared_as_compose_does_and_served_by_all():
    [script] = SERVICES["prepare"]["command"]
    for service in ("gateway", "worker"):
        [prepare] = pod(service)["initContainers"]
        assert prepare["command"] == SERVICES["prepare"]["entrypoint"]
        assert prepare["args"] == [script.replace("$$", "$")]
        assert settings(service).model == "/models/served"
    assert "MODEL" in NAMED["ConfigMap", "pagefleet"]["data"]
