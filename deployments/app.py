"""The Serve application: `import_path: coissue.deployments.app:build` in a Serve YAML.

`build` runs in a task of the cluster, whenever `args` change: it only checks the settings and binds
deployments. Settings travel as `user_config`, so that replicas take changed ones over live.
"""

# No `from __future__ import annotations`: Serve reads the class of `args` from the annotation.
import hashlib
import importlib.metadata
import json
from typing import Any, Self, cast

import ray
from pydantic import ModelWrapValidatorHandler, model_validator
from ray.serve._private.config import DeploymentConfig
from ray.serve.deployment import Application, Deployment
from ray.serve.exceptions import RayServeException

from coissue.deployments.config_file import check_args
from coissue.deployments.control import Control
from coissue.deployments.discovery import POOL, as_deployment
from coissue.deployments.http.intake import SPARE
from coissue.deployments.pool import Pool
from coissue.deployments.settings import AppSettings
from coissue.deployments.tenant import DedicatedTenant


class Args(AppSettings):
    """Wrong ones are told as `coissue validate` tells them, without a trace, in `serve status`."""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        _, lines = check_args(given, "args") if isinstance(given, dict) else (None, [])
        if lines:
            raise RayServeException("\n".join(lines))
        return handler(given)


class KeptConfig(DeploymentConfig):
    """Keeps the replicas when `args` change.

    Serve counts `args` as code: any change of them is a new version of every deployment, which
    restarts them all (`get_app_code_version` of ray 2.60). Here the version is that of the code.
    If Serve one day does not ask for `to_proto`, it restarts replicas as for any application.
    """

    def to_proto(self) -> Any:
        proto: Any = cast(Any, super()).to_proto()  # Ray has no types for it
        proto.version = describe_code()
        return proto


def describe_code() -> str:
    """Changes with this package and with the application's environment."""
    environment = dict(ray.get_runtime_context().runtime_env)
    text = json.dumps([importlib.metadata.version("coissue"), environment], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def keep(deployment: Deployment) -> Deployment:
    deployment._deployment_config.__class__ = KeptConfig
    return deployment


def build(args: Args) -> Application:
    """One control replica, the shared pool as ingress, and a deployment per dedicated tenant."""
    settings = args.model_dump(mode="json")
    control = keep(as_deployment(Control).options(user_config=settings)).bind()
    dedicated = {
        tenant.name: keep(as_deployment(DedicatedTenant).options(name=tenant.name)).bind()
        for tenant in args.tenants
        if tenant.isolation == "dedicated"
    }
    pool = as_deployment(Pool).options(
        name=POOL,
        num_replicas=args.pool.replicas,
        max_ongoing_requests=args.pool.ongoing_requests + SPARE,
        user_config=settings,
    )
    return keep(pool).bind(control, dedicated)
