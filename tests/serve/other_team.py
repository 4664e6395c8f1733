"""Another team's Serve, as a process: `python other_team.py PORT`, until its stdin ends.

It starts a Ray, declares application "declared" and runs application "ran". Prints Ray's address;
then, for each line that comes in, the state of its applications; for the line "drivers" how many
processes use this Ray that have not ended.
"""

from __future__ import annotations

import json
import sys

import ray
from ray import serve
from ray._private.state import jobs
from ray.serve._private.api import serve_start
from ray.serve.schema import ServeDeploySchema


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Hello:
    def __call__(self, request):
        return "hello"


declared = Hello.bind()


def main() -> None:
    context = ray.init(address="local", num_cpus=8, include_dashboard=False, namespace="serve")
    options = {"host": "127.0.0.1", "port": int(sys.argv[1])}
    client = serve_start(http_options=options, proxy_location="HeadOnly")
    application = {
        "name": "declared",
        "route_prefix": "/declared",
        "import_path": "other_team:declared",
    }
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    serve.run(Hello.bind(), name="ran", route_prefix="/ran")
    print(json.dumps(context.address_info["gcs_address"]), flush=True)
    for line in sys.stdin:
        if line.strip() == "drivers":
            print(json.dumps(sum(not job["IsDead"] for job in jobs())), flush=True)
            continue
        found = client.get_serve_details()["applications"]
        print(json.dumps({name: app["status"] for name, app in found.items()}), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
