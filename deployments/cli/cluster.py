"""A cluster that others use too: their applications stay, ours come and go.

Serve takes a config for the whole set of declared applications and removes what it does not list.
So ours are added to that set, and taken out at the end. A mark in Ray's key-value store tells which
job started them: what one that was killed left behind may be replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coissue.deployments.config_file import IMPORT_PATH
from coissue.deployments.discovery import NAMESPACE

MARK: Final = "coissue-up:"


class UpError(Exception):
    """One line for people."""


def check_room(
    running: Mapping[str, Mapping[str, Any]], wanted: Sequence[Any], owners: Mapping[str, bool]
) -> None:
    """Raises `UpError` where one of `running` (name -> Serve's description) is in the way of a
    wanted one. `owners` says of those that a `coissue up` started whether it still runs."""
    names = [application.name for application in wanted]
    routes = [application.route_prefix for application in wanted]
    for name, app in running.items():
        if owners.get(name) is False:
            continue
        declared = app.get("deployed_app_config") or {}
        route = app.get("route_prefix") or declared.get("route_prefix")
        if name in names:
            who = "another `coissue up`" if owners.get(name) else "somebody else"
            at = f"applications.{names.index(name)}.name"
            raise UpError(f"{at}: {who} runs an application {name!r} in this cluster")
        if route is not None and route in routes:
            at = f"applications.{routes.index(route)}.route_prefix"
            raise UpError(f"{at}: {route!r} belongs to application {name!r} of this cluster")
        if declared.get("import_path") == IMPORT_PATH:
            raise UpError(
                f"this cluster runs coissue already, as application {name!r}, and one is all it "
                "takes: add your tenants to its config"
            )


def join(client: Any, schema: Any) -> None:
    """Deploy the applications of `schema` beside those of the cluster. Raises `UpError`."""
    import ray
    from ray._private.state import jobs
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    known: list[dict[str, Any]] = jobs()  # type: ignore[no-untyped-call]  # Ray's own, untyped
    alive = {job["JobID"] for job in known if not job["IsDead"]}
    keys = {application.name: MARK + application.name for application in schema.applications}
    marks = {name: _internal_kv_get(key, namespace=NAMESPACE) for name, key in keys.items()}
    owners = {name: mark.decode() in alive for name, mark in marks.items() if mark}
    check_room(_find_running(client), schema.applications, owners)
    for key in keys.values():
        _internal_kv_put(key, ray.get_runtime_context().get_job_id(), namespace=NAMESPACE)
    for application in schema.applications:
        application.logging_config = application.logging_config or schema.logging_config
    _declare(client, schema, schema.applications)


def leave(client: Any, schema: Any, also: Sequence[str]) -> None:
    """Take down the applications of `schema`, and `also` those of these names that are there."""
    from ray.experimental.internal_kv import _internal_kv_del

    names = [application.name for application in schema.applications]
    _declare(client, schema, [])
    with contextlib.suppress(TimeoutError):
        client.delete_apps([*names, *(set(also) & set(_find_running(client)))])
    for name in names:
        _internal_kv_del(MARK + name, namespace=NAMESPACE)


def _find_running(client: Any) -> dict[str, dict[str, Any]]:
    applications: dict[str, dict[str, Any]] = client.get_serve_details()["applications"]
    return {name: app for name, app in applications.items() if app["status"] != "DELETING"}


def _declare(client: Any, schema: Any, ours: Sequence[Any]) -> None:
    """What others have declared, and `ours`."""
    import ray

    # What else is written down was deleted since, or replaced by `serve.run`.
    there = {n for n, app in _find_running(client).items() if app["source"] == "declarative"}
    theirs = there - {application.name for application in schema.applications}
    known = ray.get(client._controller.get_app_configs.remote())
    kept = [config for name, config in known.items() if name in theirs]
    capacity = client.get_serve_details().get("target_capacity") if kept else schema.target_capacity
    update = {"applications": [*kept, *ours], "target_capacity": capacity, "logging_config": None}
    client.deploy_apps(schema.model_copy(update=update))
