"""What `coissue up` finds in a cluster that others use, and what of it is in its way."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import yaml
from typer.testing import CliRunner

from coissue.deployments.cli import up
from coissue.deployments.cli.cluster import UpError, check_room
from coissue.deployments.cli.main import app
from coissue.deployments.config_file import IMPORT_PATH


@dataclass
class Wanted:
    name: str = "coissue"
    route_prefix: str | None = "/"


def running(name, route, import_path="team.app:app"):
    declared = {"import_path": import_path, "route_prefix": route}
    return {name: {"route_prefix": route, "deployed_app_config": declared}}


OURS = running("coissue", "/", IMPORT_PATH)
#: Applications of the cluster, what a `coissue up` started and whether it lives, and what is said.
CLUSTERS = [
    ({}, {}, None),
    (running("theirs", "/theirs"), {}, None),
    ({"ran": {"route_prefix": "/ran", "deployed_app_config": None}}, {}, None),
    ({"tenant-a": {"route_prefix": None, "deployed_app_config": None}}, {}, None),
    (OURS, {}, "applications.0.name: somebody else runs an application 'coissue' in this cluster"),
    (
        OURS,
        {"coissue": True},
        "applications.0.name: another `coissue up` runs an application 'coissue' in this cluster",
    ),
    # Left by one that was killed: replaced.
    (OURS, {"coissue": False}, None),
    (
        running("theirs", "/"),
        {},
        "applications.0.route_prefix: '/' belongs to application 'theirs' of this cluster",
    ),
    # Its route is not known to Serve before it is built.
    (
        {"theirs": {"route_prefix": None, "deployed_app_config": {"route_prefix": "/"}}},
        {},
        "applications.0.route_prefix: '/' belongs to application 'theirs' of this cluster",
    ),
    (
        running("serving", "/serving", IMPORT_PATH),
        {},
        "this cluster runs coissue already, as application 'serving', and one is all it takes: "
        "add your tenants to its config",
    ),
]


@pytest.mark.parametrize(("applications", "owners", "said"), CLUSTERS)
def test_room_in_a_cluster(applications, owners, said):
    if said is None:
        check_room(applications, [Wanted()], owners)
        return
    with pytest.raises(UpError) as error:
        check_room(applications, [Wanted()], owners)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("host", "address", "found"),
    [
        # The last two hosts are from the block for documentation (RFC 5737): nothing is asked.
        ("127.0.0.1", None, "127.0.0.1"),
        ("0.0.0.0", None, "127.0.0.1"),
        ("0.0.0.0", "auto", "127.0.0.1"),
        ("0.0.0.0", "192.0.2.7:6379", "192.0.2.7"),
        ("192.0.2.8", "192.0.2.7:6379", "192.0.2.8"),
    ],
)
def test_http_is_where_serve_listens_whatever_the_file_says(host, address, found):
    application = {"import_path": IMPORT_PATH, "route_prefix": "/api", "args": {}}
    config = {"http_options": {"port": 8000}, "applications": [application]}

    class Http:
        port, root_path = 8123, "/root"

    Http.host = host
    base = f"http://{found}:{Http.port}{Http.root_path}/api"
    assert up._base_url(Http, config, address) == base


@pytest.mark.parametrize(("options", "port"), [((), 8000), (("--port", "9001"), 9001)])
@pytest.mark.parametrize(("ray", "address"), [("", None), ("local", None), ("a:1", "a:1")])
def test_port_and_address_of_the_command(tmp_path, monkeypatch, options, port, ray, address):
    tenant = {"name": "a", "model": {"factory": "json:dumps"}, "slo": "fast"}
    args = {"slo_classes": {"fast": {"deadline_ms": 50}}, "tenants": [tenant]}
    config = {
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [{"import_path": IMPORT_PATH, "args": args}],
    }
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    given = {}

    def serve(config, settings, *, address, **_):
        given.update(config["http_options"], address=address)

    monkeypatch.setattr(up, "serve_until_interrupted", serve)
    result = CliRunner().invoke(
        app, ["up", str(tmp_path / "serve.yaml"), *options], env={"RAY_ADDRESS": ray}
    )
    assert result.exit_code == 0, result.output
    assert given == {"host": "127.0.0.1", "port": port, "address": address}
