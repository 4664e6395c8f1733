"""Reading a Serve YAML with one coissue application in it, strictly.

Ray ignores keys it does not know, so a typo would pass silently: the models here list the keys that
Ray 2.60 knows at each level, and everything else is an error with its path. Routes and numbers that
matter here are checked too, because Ray takes `true` for 1. Ray itself is not imported. Every error
is one line: `FILE: path.of.the.key: what is allowed, not what is there`; several are several lines.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Hashable
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from textwrap import indent
from types import GenericAlias
from typing import Annotated, Any, Final, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from coissue.deployments.discovery import CONTROL, POOL
from coissue.deployments.handlers import check_handler, in_words_of_yaml
from coissue.deployments.settings import AppSettings, HandlerSettings, find_misfits

IMPORT_PATH: Final = "coissue.deployments.app:build"
#: In one file. A tenant has about fifty.
VALUES_MAX: Final = 1_000_000
ERRORS_MAX: Final = 20


class ConfigError(Exception):
    """For people: one line per error."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _level(title: str, keys: str, /, **typed: Any) -> Any:
    """A level of the file: these `keys` of any type, which Ray checks, and the `typed` ones."""
    untyped: dict[str, Any] = dict.fromkeys(keys.split(), (Any, None))
    return create_model(title, __base__=_Strict, **untyped, **typed)


def _check_route(route: str) -> str:
    if not re.fullmatch(r"/|(/[^/{}?#\s]+)+", route):
        raise ValueError(f"must look like '/' or '/some/path', not {route!r}")
    return route


def _check_app_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?", name):
        raise ValueError(f"1 to 64 of A-Z a-z 0-9 . _ - are possible, not {_show(name)}")
    return name


Route = Annotated[str, AfterValidator(_check_route)]

LogLevel = Literal["CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET"]
LoggingOptions = _level(
    "LoggingOptions",
    "logs_dir enable_access_log additional_log_standard_attrs",
    encoding=(Literal["TEXT", "JSON"], "TEXT"),
    log_level=(Annotated[int, Field(ge=0, le=50)] | LogLevel, "INFO"),
)
GrpcOptions = _level(
    "GrpcOptions", "port grpc_servicer_functions request_timeout_s enable_reflection"
)
HttpOptions = _level(
    "HttpOptions",
    "ssl_keyfile ssl_certfile ssl_keyfile_password ssl_ca_certs",
    host=(str, "0.0.0.0"),
    port=(int, Field(default=8000, ge=1, le=65_535)),
    root_path=(Literal[""] | Route, ""),
    # Seconds, at most a week.
    request_timeout_s=(float | None, Field(default=None, ge=0, le=604_800)),
    keep_alive_timeout_s=(int, Field(default=90, ge=0, le=604_800)),
)
Deployment = _level(
    "Deployment",
    "name backpressure_config user_config autoscaling_config graceful_shutdown_wait_loop_s "
    "graceful_shutdown_timeout_s health_check_period_s health_check_timeout_s ray_actor_options "
    "placement_group_bundles placement_group_strategy placement_group_bundle_label_selector "
    "max_replicas_per_node logging_config request_router_config gang_scheduling_config "
    "deployment_actors rolling_update_percentage max_surge_percent",
    num_replicas=(Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] | None, None),
    max_ongoing_requests=(Annotated[int, Field(ge=1, le=65_536)], None),
    max_queued_requests=(Annotated[int, Field(ge=-1, le=1_000_000)], None),
)
EnvConfig = _level(
    "EnvConfig",
    "log_files",
    # Seconds; -1: as long as it takes.
    setup_timeout_seconds=(int, Field(default=600, ge=-1, le=604_800)),
    eager_install=(bool, True),
)
Packages = str | list[str] | dict[str, Any] | None
#: Checked here, because what Ray does not take lets Serve try again for ever.
RuntimeEnv = _level(
    "RuntimeEnv",
    "java_jars worker_process_setup_hook py_executable image_uri container",
    env_vars=(dict[str, str], {}),
    working_dir=(str | None, None),
    py_modules=(list[str] | None, None),
    excludes=(list[str] | None, None),
    pip=(Packages, None),
    uv=(Packages, None),
    conda=(Packages, None),
    config=(EnvConfig | None, None),
)
Application = _level(
    "Application",
    "autoscaling_policy external_scaler_enabled",
    runtime_env=(RuntimeEnv, {}),
    import_path=(str, ...),
    name=(Annotated[str, AfterValidator(_check_app_name)], "default"),
    route_prefix=(Route | None, "/"),
    args=(dict[str, Any], {}),
    deployments=(GenericAlias(list, Deployment), []),
    logging_config=(LoggingOptions | None, None),
)
ServeConfig = _level(
    "ServeConfig",
    "controller_options tracing_config",
    target_capacity=(Annotated[float, Field(ge=0, le=100)] | None, None),
    proxy_location=(Literal["Disabled", "HeadOnly", "EveryNode"], "EveryNode"),
    http_options=(HttpOptions, HttpOptions()),
    grpc_options=(GrpcOptions | None, None),
    logging_config=(LoggingOptions | None, None),
    applications=(GenericAlias(list, Application), Field(min_length=1)),
)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would silently keep the last, and escapes
    that are half of a surrogate pair, which no JSON carries."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text: str = super().construct_scalar(node)
        text.encode()
        return text

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


def _load(text: str) -> Any:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        _count_values(root, {})
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


def _count_values(node: yaml.Node | None, counted: dict[int, int]) -> int:
    """Values in `node`, those behind each alias again. A few hundred bytes can mean billions."""
    if id(node) not in counted:
        counted[id(node)] = VALUES_MAX + 1  # an alias of what it is in itself has no end
        parts = getattr(node, "value", None)
        total = 1
        for part in parts if isinstance(parts, list) else ():
            pair = part if isinstance(part, tuple) else (part,)
            total += sum(_count_values(inner, counted) for inner in pair)
        if total > VALUES_MAX:
            raise yaml.YAMLError(f"more than {VALUES_MAX} values, those of aliases included")
        counted[id(node)] = total
    return counted[id(node)]


def load_app_config(path: str | Path) -> tuple[dict[str, Any], AppSettings]:
    """(the whole Serve config, the settings of its coissue application). Raises `ConfigError`."""
    try:
        config = _read_yaml(Path(path))
        return config, _check(config)
    except ConfigError as error:
        raise ConfigError(indent(str(error), f"{path}: ")) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ConfigError("not a file")
        config = _load(path.read_text(encoding="utf-8"))
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
        raise ConfigError(_join([*_explain(error, "", config), *_find_in_args(config)])) from None
    ours = [i for i, app in enumerate(serve.applications) if app.import_path == IMPORT_PATH]
    if len(ours) != 1:
        raise ConfigError(
            f"applications: {len(ours) or 'none'} with import_path {IMPORT_PATH}, one is needed"
        )
    _check_deployments(serve.applications[ours[0]], f"applications.{ours[0]}")
    settings, lines = check_args(serve.applications[ours[0]].args, f"applications.{ours[0]}.args")
    if settings is None or lines:
        raise ConfigError(_join(lines))
    return settings


def _find_in_args(config: dict[str, Any]) -> list[str]:
    """What else is wrong, in a config that is wrong around our arguments."""
    applications = config.get("applications")
    for index, app in enumerate(applications if isinstance(applications, list) else ()):
        args = app.get("args") if isinstance(app, dict) else None
        if isinstance(args, dict) and app.get("import_path") == IMPORT_PATH:
            return check_args(args, f"applications.{index}.args")[1]
    return []


def check_args(args: dict[str, Any], where: str) -> tuple[AppSettings | None, list[str]]:
    """The settings, if they are any, and all that is wrong: a line each, the key first."""
    settings, lines = None, []
    try:
        settings = AppSettings.model_validate(args)
    except ValidationError as error:
        lines = _explain(error, where, args)
    given, classes = args.get("tenants"), args.get("slo_classes")
    items = given if isinstance(given, list | tuple) else ()
    tenants = [one if isinstance(one, dict) else {} for one in items]
    if isinstance(classes, dict):
        named = [(_text(one.get("name")), _text(one.get("slo"))) for one in tenants]
        known = [name for name in classes if isinstance(name, str)]
        lines += [f"{where}.{line}" for line in find_misfits(named, known)]
    for index, tenant in enumerate(tenants):
        with suppress(ValidationError):  # it is among those above
            wrong = check_handler(HandlerSettings.model_validate(tenant.get("handler")))
            lines += [f"{where}.tenants.{index}.handler.{wrong}"] if wrong else []
    return settings, list(dict.fromkeys(lines))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _check_deployments(application: Any, where: str) -> None:
    """Serve itself finds a name that does not exist late, and takes any number of the others."""
    named = application.args.get("tenants")
    tenants = [t for t in named if isinstance(t, dict)] if isinstance(named, list) else []
    dedicated = [str(t.get("name")) for t in tenants if t.get("isolation") == "dedicated"]
    names = [CONTROL, POOL, *dedicated]
    for index, deployment in enumerate(application.deployments):
        path = f"{where}.deployments.{index}"
        if deployment.name not in names:
            allowed = ", ".join(names)
            raise ConfigError(f"{path}.name: there are: {allowed}, not {_show(deployment.name)}")
        if deployment.name == CONTROL and (
            deployment.num_replicas not in (None, 1) or deployment.autoscaling_config
        ):
            raise ConfigError(f"{path}.num_replicas: {CONTROL} is one replica by design")
        if deployment.name == POOL and deployment.max_ongoing_requests is not None:
            raise ConfigError(f"{path}.max_ongoing_requests: set args.pool.ongoing_requests")


_SENTENCES: Final = {
    "extra_forbidden": "unknown key",
    "missing": "missing",
    "too_short": "at least one is needed",
}


def _explain(error: ValidationError, where: str, given: Any) -> list[str]:
    """A line for each key at fault in `given`: its path, what it may be and what it is."""
    #: Path -> its errors: each branch of a union has its own.
    found: dict[str, list[Any]] = {}
    for one in error.errors(include_url=False, include_context=False):
        found.setdefault(_path(one, where, given), []).append(one)
    for path in [path for path, (first, *_) in found.items() if first["type"] == "too_short"]:
        if any(other.startswith(f"{path}.") for other in found):
            del found[path]  # what is wrong in its items is why it has too few of them
    lines: list[str] = []
    for path, errors in found.items():
        said = " or ".join(one["msg"] for one in errors).removeprefix("Value error, ")
        said = in_words_of_yaml(said.replace(" or Input should be", " or"))
        first, kind = errors[0], errors[0]["type"]
        if kind in _SENTENCES:
            said = _SENTENCES[kind]
        elif kind != "value_error":
            said += f", not {_show(first['input'])}"
        # A check of the whole application has a line for each path below it.
        glue = "." if kind == "value_error" and path == where else ": "
        lines += [f"{path}{glue}{line}" for line in said.splitlines()]
    return lines


def _join(lines: list[str]) -> str:
    more = [f"and {len(lines) - ERRORS_MAX} more"] if len(lines) > ERRORS_MAX else []
    return "\n".join(lines[:ERRORS_MAX] + more)


def _path(error: Any, where: str, given: Any) -> str:
    """Without the names of the union branches, which pydantic puts between the keys."""
    keys = [where] if where else []
    for key in error["loc"]:
        try:
            given = given[key]
        except (LookupError, TypeError):
            if error["type"] != "missing":
                continue
        keys.append(str(key))
    return ".".join(keys)


def _show(value: Any) -> str:
    try:
        return repr(value)[:60]
    except ValueError:  # an integer of thousands of digits
        return "that"


def find_missing(config: dict[str, Any], settings: AppSettings) -> list[str]:
    """What the config names and this machine lacks, with the path of its key."""
    paths = [app["import_path"] for app in config["applications"]]
    ours = paths.index(IMPORT_PATH)
    args = f"applications.{ours}.args"
    named: dict[str, Any] = {f"applications.{i}.import_path": p for i, p in enumerate(paths)}
    del named[f"applications.{ours}.import_path"]
    for index, app in enumerate(config["applications"]):
        folder = (app.get("runtime_env") or {}).get("working_dir") or ""
        if "://" not in folder:
            named[f"applications.{index}.runtime_env.working_dir"] = folder
    named[f"{args}.scheduler.secret_file"] = settings.scheduler.secret_file
    named[f"{args}.scheduler.record_to"] = os.path.dirname(settings.scheduler.record_to or "")
    for index, tenant in enumerate(settings.tenants):
        at, handler = f"{args}.tenants.{index}", tenant.handler
        for key in ("factory", "program", "checkpoint"):
            named[f"{at}.model.{key}"] = getattr(tenant.model, key)
        if handler and handler.is_builtin:
            named[f"{at}.handler.kwargs.tokenizer"] = handler.kwargs.get("tokenizer")
        elif handler:
            named[f"{at}.handler.use"] = handler.use
    lacks = {key: _find_lack(key, str(name)) for key, name in named.items() if name}
    return [f"{key}: {lack} here" for key, lack in lacks.items() if lack]


def _find_hooked(full: str, at: list[str]) -> ModuleSpec | None:
    """Below an editable install, whose places are no folders."""
    if full.count(".") == 0 or all(map(os.path.exists, at)):
        return None
    with suppress(ImportError, KeyError):
        return PathFinder.find_spec(full, at)
    return None


def _find_lack(key: str, place: str) -> str:
    """`pkg.mod:name` (or `pkg.mod.name`, as Ray takes it) is looked for as `coissue up` would, but
    nothing of it is imported or run."""
    if not key.endswith((".factory", ".use", ".import_path")):
        return "" if os.path.exists(place) else f"no file {place!r}"
    module, _, name = place.partition(":") if ":" in place else place.rpartition(".")
    spec: ModuleSpec | None = None
    at, full, finders = [os.getcwd(), *sys.path], "", [f for f in sys.meta_path if f != PathFinder]
    for part in module.split("."):
        full = f"{full}.{part}".lstrip(".")
        # By its last part alone: asked for a whole name, the finder wants the parent imported.
        spec = PathFinder.find_spec(part, at) or _find_hooked(full, at)
        # As the import system asks: of a path, built-in modules are in none.
        within = None if full == part else at
        found = (finder.find_spec(full, within) for finder in finders)
        spec = spec or next(filter(None, found), None)
        if spec is None:  # below what is no folder (an archive, an editable install) it may be
            return f"no module {full!r}" if full == part or all(map(os.path.exists, at)) else ""
        at = list(spec.submodule_search_locations or ())
    if spec is None or spec.loader is None:
        return f"no module {module!r}, only a folder"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    made = rf"\b{re.escape(name)}\b|import \*|__getattr__|globals\(|setattr\(|exec\("
    text = Path(spec.origin).read_text(errors="replace")
    return "" if re.search(made, text) else f"no {name!r} in module {module!r}"
