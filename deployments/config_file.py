"""Reading a Serve YAML with one coissue application in it, strictly.

Ray ignores keys it does not know, so a typo would pass silently: the models here list the keys that
Ray 2.60 knows at each level, and everything else is an error with its path. Ray itself is not
imported. Every error is one line: `FILE: path.of.the.key: sentence`.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from coissue.deployments.handlers import check_handler
from coissue.deployments.settings import AppSettings

IMPORT_PATH: Final = "coissue.deployments.app:build"


class ConfigError(Exception):
    """One line for people."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _level(title: str, keys: str, /, **typed: Any) -> Any:
    """A level of the file: these `keys` of any type, which Ray checks, and the `typed` ones."""
    untyped: dict[str, Any] = dict.fromkeys(keys.split(), (Any, None))
    return create_model(title, __base__=_Strict, **untyped, **typed)


LoggingOptions = _level(
    "LoggingOptions", "encoding log_level logs_dir enable_access_log additional_log_standard_attrs"
)
GrpcOptions = _level(
    "GrpcOptions", "port grpc_servicer_functions request_timeout_s enable_reflection"
)
HttpOptions = _level(
    "HttpOptions",
    "request_timeout_s keep_alive_timeout_s ssl_keyfile ssl_certfile ssl_keyfile_password "
    "ssl_ca_certs",
    host=(str, "0.0.0.0"),
    port=(int, Field(default=8000, ge=0, le=65_535)),
    root_path=(str, ""),
)
Deployment = _level(
    "Deployment",
    "name num_replicas max_ongoing_requests max_queued_requests backpressure_config user_config "
    "autoscaling_config graceful_shutdown_wait_loop_s graceful_shutdown_timeout_s "
    "health_check_period_s health_check_timeout_s ray_actor_options placement_group_bundles "
    "placement_group_strategy placement_group_bundle_label_selector max_replicas_per_node "
    "logging_config request_router_config gang_scheduling_config deployment_actors "
    "rolling_update_percentage max_surge_percent",
)
Application = _level(
    "Application",
    "runtime_env autoscaling_policy external_scaler_enabled",
    import_path=(str, ...),
    name=(str, "default"),
    route_prefix=(str | None, "/"),
    args=(dict[str, Any], {}),
    deployments=(list[Deployment], []),
    logging_config=(LoggingOptions | None, None),
)
ServeConfig = _level(
    "ServeConfig",
    "controller_options tracing_config target_capacity",
    proxy_location=(Literal["Disabled", "HeadOnly", "EveryNode"], "EveryNode"),
    http_options=(HttpOptions, HttpOptions()),
    grpc_options=(GrpcOptions | None, None),
    logging_config=(LoggingOptions | None, None),
    applications=(list[Application], Field(min_length=1)),
)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key_node.value!r} is there twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load_app_config(path: str | Path) -> tuple[dict[str, Any], AppSettings]:
    """(the whole Serve config, the settings of its coissue application). Raises `ConfigError`."""
    try:
        config = _read_yaml(Path(path))
        return config, _check(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError("not a file")
    try:
        config = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}{error.problem or 'not valid YAML'}") from None
    except (
        yaml.YAMLError, RecursionError, ValueError, KeyError, TypeError, AttributeError,
    ) as error:  # the last four: scalars whose tag says what they are not  # fmt: skip
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ConfigError("applications: missing, this is not a Serve config")
    return config


def _check(config: dict[str, Any]) -> AppSettings:
    try:
        serve = ServeConfig.model_validate(config)
    except ValidationError as error:
        raise ConfigError(_one_line(error, "")) from None
    ours = [i for i, app in enumerate(serve.applications) if app.import_path == IMPORT_PATH]
    if len(ours) != 1:
        raise ConfigError(
            f"applications: {len(ours) or 'none'} with import_path {IMPORT_PATH}, one is needed"
        )
    where = f"applications.{ours[0]}.args"
    try:
        settings = AppSettings.model_validate(serve.applications[ours[0]].args)
    except ValidationError as error:
        raise ConfigError(_one_line(error, where)) from None
    for index, tenant in enumerate(settings.tenants):
        wrong = tenant.handler and check_handler(tenant.handler)
        if wrong:
            raise ConfigError(f"{where}.tenants.{index}.handler.{wrong}")
    return settings


_SENTENCES: Final = {"extra_forbidden": "unknown key", "missing": "missing"}


def _one_line(error: ValidationError, where: str) -> str:
    """The first error, with the path of its key."""
    errors = error.errors(include_url=False, include_context=False)
    first = errors[0]
    path = ".".join(filter(None, (where, *map(str, first["loc"]))))
    sentence = _SENTENCES.get(first["type"], first["msg"].removeprefix("Value error, "))
    if first["type"].endswith(("_type", "_parsing", "_error")) and first["type"] != "value_error":
        sentence += f", not {repr(first['input'])[:60]}"
    # A check of the whole application names the path below it itself.
    glue = "." if first["type"] == "value_error" and path == where else ": "
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{path}{glue}{sentence}{more}".replace("\n", " ")
