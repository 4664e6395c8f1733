"""The Serve application: `import_path: coissue.deployments.app:build` in a Serve YAML.

`build` runs in a task of the cluster: it only checks the settings and binds deployments.
"""

# No `from __future__ import annotations`: Serve reads the class of `args` from the annotation.
from ray.serve.deployment import Application

from coissue.deployments.control import Control
from coissue.deployments.discovery import POOL
from coissue.deployments.http.intake import SPARE
from coissue.deployments.pool import Pool
from coissue.deployments.settings import AppSettings
from coissue.deployments.tenant import DedicatedTenant


def build(args: AppSettings) -> Application:
    """One control replica, the shared pool as ingress, and a deployment per dedicated tenant."""
    settings = args.model_dump(mode="json")
    control = Control.bind(settings)
    dedicated = {
        tenant.name: DedicatedTenant.options(name=tenant.name).bind(
            tenant.handler.model_dump(mode="json")
        )
        for tenant in args.tenants
        if tenant.isolation == "dedicated" and tenant.handler
    }
    pool = Pool.options(
        name=POOL,
        num_replicas=args.pool.replicas,
        max_ongoing_requests=args.pool.ongoing_requests + SPARE,
    )
    return pool.bind(settings, control, dedicated)
