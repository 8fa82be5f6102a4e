"""What can be checked of compose/ without an engine: that all it names exists."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from pagefleet.command_line import parse
from pagefleet.settings import GatewaySettings, SchedulerSettings, WorkerSettings
from pagefleet_gateway.http.edge import OPEN_PATHS

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "compose/compose.yml").read_text())
OBSERVE = yaml.safe_load((ROOT / "compose/observe.yml").read_text())["services"]
GPU = yaml.safe_load((ROOT / "compose/gpu.yml").read_text())["services"]
MACHINES = yaml.safe_load((ROOT / "compose/machines.yml").read_text())
FAR = yaml.safe_load((ROOT / "compose/worker.yml").read_text())
SERVICES = COMPOSE["services"]
SETTINGS = {"gateway": GatewaySettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}


def instructions(dockerfile):
    """Pairs of an instruction's name and its text."""
    text = (ROOT / "compose" / dockerfile).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def settings(service):
    return parse(SETTINGS[service], SERVICES[service]["command"], env={})


@pytest.mark.parametrize("service", SETTINGS)
def test_a_dockerfile_copies_only_what_exists_and_starts_its_service(service):
    steps = instructions(f"Dockerfile.{service}")
    sources = [s for name, rest in steps if name == "COPY" for s in rest.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "pyproject.toml" in sources
    assert all((ROOT / source).exists() and f"!{source}" in ignored for source in sources)
    assert steps[-1] == ("ENTRYPOINT", f'["pagefleet", "{service}"]')


@pytest.mark.parametrize(
    ("service", "installed"),
    [("gateway", ".[tracing]"), ("scheduler", "."), ("worker", ".[worker]")],
)
def test_only_the_worker_s_image_has_torch(service, installed):
    run = dict(instructions(f"Dockerfile.{service}"))["RUN"]
    assert [word for word in shlex.split(run) if word.startswith(".")] == [installed]


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_is_built_from_a_dockerfile_that_exists(service):
    build = SERVICES[service]["build"]
    context = ROOT / "compose" / build["context"]
    assert context.resolve() == ROOT
    assert (context / build["dockerfile"]).is_file()


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_mounts_volumes_that_are_declared_on_folders_that_its_image_makes(service):
    dockerfile = Path(SERVICES[service]["build"]["dockerfile"]).name
    made = dict(instructions(dockerfile))["RUN"].split()
    for mount in SERVICES[service]["volumes"]:
        volume, folder = mount.split(":")
        assert volume in COMPOSE["volumes"]
        assert folder in made


def test_what_a_worker_compiles_is_kept_in_a_volume():
    worker = SERVICES["worker"]
    assert worker["environment"].keys() == {"XDG_CACHE_HOME", "TRITON_CACHE_DIR"}
    folders = [mount.partition(":")[2] for mount in worker["volumes"]]
    for cache in worker["environment"].values():
        assert any(cache.startswith(f"{folder}/") for folder in folders)


def test_the_services_meet_at_the_same_sockets_in_the_shared_volume():
    gateway, scheduler, worker = (settings(s) for s in ("gateway", "scheduler", "worker"))
    assert gateway.gateway_endpoint == scheduler.gateway_endpoint
    assert worker.worker_endpoint == scheduler.worker_endpoint
    for endpoint in (scheduler.gateway_endpoint, scheduler.worker_endpoint):
        assert endpoint.startswith("ipc:///run/pagefleet/")
    for service in SETTINGS:
        assert "run:/run/pagefleet" in SERVICES[service]["volumes"]


def test_the_gateway_listens_where_its_port_is_published_and_has_time_to_drain():
    gateway = settings("gateway")
    assert SERVICES["gateway"]["ports"] == [f"127.0.0.1:{gateway.port}:{gateway.port}"]
    assert gateway.host == "0.0.0.0"
    grace = float(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace > gateway.shutdown_timeout


def test_the_gateway_ends_before_the_workers_and_these_before_the_scheduler():
    """Compose stops who needs others first: open streams have their time with all else there."""
    order = [SERVICES[service].get("depends_on", {}) for service in ("gateway", "worker")]
    assert [needed.keys() - {"prepare"} for needed in order] == [{"worker"}, {"scheduler"}]


def test_health_is_asked_of_a_route_that_needs_no_key():
    told = " ".join(SERVICES["gateway"]["healthcheck"]["test"])
    [url] = re.findall(r"http://[^\"']+", told)
    assert urlsplit(url).path in OPEN_PATHS
    assert urlsplit(url).port == settings("gateway").port


@pytest.mark.parametrize("service", SETTINGS)
def test_a_service_runs_as_a_user_who_owns_the_folders_of_the_volumes(service):
    steps = instructions(f"Dockerfile.{service}")
    assert steps[-2] == ("USER", "pagefleet")
    words = shlex.split(dict(steps)["RUN"])
    assert "--uid 1000" in " ".join(words[words.index("useradd") :])
    made = words[words.index("install", words.index("useradd")) :]
    assert made[made.index("--owner") + 1] == "pagefleet"


def test_the_gpu_is_reserved_for_the_one_service_that_has_torch():
    [(name, worker)] = GPU.items()
    assert SERVICES[name]["build"]["dockerfile"].endswith("Dockerfile.worker")
    [device] = worker["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_other_machines_meet_the_scheduler_at_the_port_that_it_opens_under_the_same_key():
    near, far = MACHINES["services"]["scheduler"], FAR["services"]["worker"]
    scheduler = parse(SchedulerSettings, near["command"], env={})
    command = [re.sub(r"\$\{MAIN:.*?\}", "main", word) for word in far["command"]]
    worker = parse(WorkerSettings, command, env={})
    port = urlsplit(scheduler.listen_workers).port
    assert near["ports"] == [f"{port}:{port}"]
    assert worker.worker_endpoint == f"tcp://main:{port}"
    for told, service, file in ((scheduler, near, MACHINES), (worker, far, FAR)):
        [secret] = service["secrets"]
        assert told.cell_key == f"/run/secrets/{secret}"
        assert file["secrets"] == {secret: {"file": "cell.key"}}
    usual = settings("scheduler")
    assert scheduler.gateway_endpoint == usual.gateway_endpoint
    assert scheduler.worker_endpoint == usual.worker_endpoint


def test_a_worker_elsewhere_is_the_one_here_but_for_where_it_meets_the_scheduler():
    far, near = FAR["services"]["worker"], SERVICES["worker"]
    for same in ("build", "environment", "restart"):
        assert far[same] == near[same]
    assert far["command"][0] == near["command"][0]
    assert far["volumes"] == [mount for mount in near["volumes"] if not mount.startswith("run:")]
    prepare = FAR["services"]["prepare"]["extends"]
    assert (ROOT / "compose" / prepare["file"]).is_file()
    assert prepare["service"] in SERVICES
    assert GPU.keys() <= FAR["services"].keys()


def test_the_key_gets_into_no_commit_and_no_image():
    assert "cell.key" in (ROOT / ".gitignore").read_text().splitlines()
    copied = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"]
    assert not any(line.startswith("!compose") for line in copied)


def test_what_observes_is_given_files_that_exist():
    for service in OBSERVE.values():
        for mount in service.get("volumes", []):
            file, _, mode = mount.split(":")
            assert (ROOT / "compose" / file).is_file()
            assert mode == "ro"
    home = OBSERVE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert any(f":{home}:" in mount for mount in OBSERVE["grafana"]["volumes"])


def test_prometheus_scrapes_the_gateways_and_grafana_asks_prometheus():
    scraped = yaml.safe_load((ROOT / "compose/prometheus.yml").read_text())["scrape_configs"]
    [found] = scraped[0]["dns_sd_configs"]
    assert found["names"] == ["gateway"]
    assert found["port"] == settings("gateway").port
    sources = yaml.safe_load((ROOT / "compose/grafana/datasources.yml").read_text())["datasources"]
    hosts = {urlsplit(source["url"]).hostname for source in sources}
    assert hosts == {"prometheus", "jaeger"}
    assert hosts <= OBSERVE.keys()


def test_the_gateway_reports_its_traces_to_what_shows_them():
    gateway = parse(GatewaySettings, [], env=OBSERVE["gateway"]["environment"])
    assert urlsplit(gateway.otlp_traces_endpoint).hostname in OBSERVE


def test_the_prepared_model_is_the_one_that_is_served(tmp_path):
    """Runs the very script, with the model `echo` and its paths moved under the test's folder."""
    [script] = SERVICES["prepare"]["command"]
    script = script.replace("$$", "$").replace("/models", str(tmp_path / "models"))
    script = script.replace("python ", f"{shlex.quote(sys.executable)} ")
    (tmp_path / "models").mkdir()
    subprocess.run(
        [*SERVICES["prepare"]["entrypoint"], script],
        env={"MODEL": "echo", "PATH": "/usr/bin:/bin"},
        check=True,
    )
    for service in ("gateway", "worker"):
        served = Path(settings(service).model.replace("/models", str(tmp_path / "models")))
        assert (served / "pagefleet.json").exists()
