"""A cluster that others use too: their applications stay, ours come and go.

Serve takes a config for the whole set of declared applications and removes what it does not list.
So ours are added to those declared, and at the end the set is declared again without them. A mark
in Ray's key-value store tells applications that a `coissue up` started, and which: what one that
was killed left behind may be replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from coissue.deployments.config_file import IMPORT_PATH
from coissue.deployments.discovery import NAMESPACE

MARK: Final = "coissue-up:"


class UpError(Exception):
    """One line for people."""


class Application(Protocol):
    name: str
    route_prefix: str | None


def check_room(
    running: Mapping[str, Mapping[str, Any]],
    wanted: Sequence[Application],
    owners: Mapping[str, bool],
) -> None:
    """Raises `UpError` where an application of the cluster is in the way of a wanted one.

    `running` is Serve's description of each by name; `owners` says of those that a `coissue up`
    started whether it still runs.
    """
    others = {name: app for name, app in running.items() if owners.get(name) is not False}
    routes = {
        app.get("route_prefix") or _declared(app, "route_prefix"): n for n, app in others.items()
    }
    for index, application in enumerate(wanted):
        name, route = application.name, application.route_prefix
        if name in others:
            who = "another `coissue up`" if owners.get(name) else "somebody else"
            raise UpError(
                f"applications.{index}.name: {who} runs an application {name!r} in this cluster"
            )
        if route is not None and route in routes:
            raise UpError(
                f"applications.{index}.route_prefix: {route!r} belongs to application "
                f"{routes[route]!r} of this cluster"
            )
    for name, app in others.items():
        if _declared(app, "import_path") == IMPORT_PATH:
            raise UpError(f"application {name!r} of this cluster is coissue: there can be only one")


def _declared(application: Mapping[str, Any], key: str) -> Any:
    return (application.get("deployed_app_config") or {}).get(key)


def _read_running(client: Any) -> dict[str, dict[str, Any]]:
    applications: dict[str, dict[str, Any]] = client.get_serve_details()["applications"]
    return {name: app for name, app in applications.items() if app["status"] != "DELETING"}


def _declare(client: Any, without: Sequence[str], more: Sequence[Any], schema: Any) -> None:
    """What is declared now, but for those of these names, and `more`."""
    import ray

    running = _read_running(client)
    declared = ray.get(client._controller.get_app_configs.remote())
    kept = [
        config
        for name, config in declared.items()
        # The rest was deleted since, or replaced by `serve.run`.
        if running.get(name, {}).get("source") == "declarative" and name not in without
    ]
    capacity = client.get_serve_details().get("target_capacity") if kept else schema.target_capacity
    update = {"applications": [*kept, *more], "target_capacity": capacity, "logging_config": None}
    client.deploy_apps(schema.model_copy(update=update))


def join(client: Any, schema: Any) -> None:
    """Deploy the applications of `schema` beside those of the cluster. Raises `UpError`."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_put

    names = [application.name for application in schema.applications]
    check_room(_read_running(client), schema.applications, _find_owners(names))
    for application in schema.applications:
        application.logging_config = application.logging_config or schema.logging_config
        job = ray.get_runtime_context().get_job_id()
        _internal_kv_put(MARK + application.name, job, namespace=NAMESPACE)
    _declare(client, names, schema.applications, schema)


def leave(client: Any, schema: Any, also: Sequence[str]) -> None:
    """Take down the applications of `schema`, and `also` those of these names that are there."""
    from ray.experimental.internal_kv import _internal_kv_del

    names = [application.name for application in schema.applications]
    _declare(client, names, [], schema)
    there = _read_running(client)
    with contextlib.suppress(TimeoutError):
        client.delete_apps([*names, *(name for name in also if name in there)])
    for name in names:
        _internal_kv_del(MARK + name, namespace=NAMESPACE)


def _find_owners(names: Sequence[str]) -> dict[str, bool]:
    """Name -> whether the `coissue up` that started it still runs; without those of others."""
    from ray._private.state import jobs
    from ray.experimental.internal_kv import _internal_kv_get

    alive = {job["JobID"] for job in jobs() if not job["IsDead"]}
    marks = {name: _internal_kv_get(MARK + name, namespace=NAMESPACE) for name in names}
    return {name: mark.decode() in alive for name, mark in marks.items() if mark}
