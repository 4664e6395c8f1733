"""`coissue validate` and `status`: one line for whatever is wrong, with the path of the key."""

from __future__ import annotations

import copy
import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from coissue.deployments import config_file, settings
from coissue.deployments.cli import up
from coissue.deployments.cli.main import app
from coissue.deployments.config_file import IMPORT_PATH, ConfigError, load_app_config

RUNNER = CliRunner()
ARGS = "applications.0.args"
CONFIG = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "logging_config": {"enable_access_log": False},
    "applications": [
        {
            "name": "coissue",
            "route_prefix": "/",
            "import_path": IMPORT_PATH,
            "args": {
                "slo_classes": {"fast": {"deadline_ms": 50}},
                "tenants": [
                    {"name": "a", "model": {"factory": "json:dumps"}, "slo": "fast"},
                    {"name": "b", "model": {"program": __file__}, "slo": "fast"},
                ],
            },
        }
    ],
}


def validate(tmp_path, text):
    path = tmp_path / "serve.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = RUNNER.invoke(app, ["validate", str(path)])
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, result.output
    return result.exit_code, lines[0].removeprefix(f"{path}: ")


def changed(path, value):
    """The config with one key set, or removed when `value` is `...`."""
    config = copy.deepcopy(CONFIG)
    *parents, last = path.split(".")
    at = config
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    last = int(last) if isinstance(at, list) else last
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return yaml.safe_dump(config)


def test_good_config(tmp_path):
    assert validate(tmp_path, yaml.safe_dump(CONFIG)) == (0, "ok: 2 tenants")


def test_other_applications_are_let_be(tmp_path):
    config = copy.deepcopy(CONFIG)
    config["applications"].insert(
        0, {"name": "own", "import_path": "team.app:app", "route_prefix": "/own"}
    )
    config["applications"][1]["args"]["tenants"][1]["slo"] = "x"
    code, line = validate(tmp_path, yaml.safe_dump(config))
    assert (code, line[:36]) == (1, "applications.1.args.tenants.1.slo: n")


T1 = f"{ARGS}.tenants.1"
BAD = [
    (
        f"{ARGS}.tenants.1.slo",
        "slow",
        f"{T1}.slo: no class 'slow' in slo_classes (there are: fast)",
    ),
    (f"{ARGS}.tenants.1.name", "a", f"{T1}.name: 'a' is there twice"),
    (f"{ARGS}.tenants.1.name", "A b", f"{T1}.name: 'A b' is not a tenant name"),
    (f"{ARGS}.tenants.1.nmae", "x", f"{T1}.nmae: unknown key"),
    (f"{ARGS}.tenants.1.slo", ..., f"{T1}.slo: missing"),
    (f"{ARGS}.tenants.1.share", "lots", f"{T1}.share: Input should be a valid number"),
    (f"{ARGS}.tenants.1.share", 0, f"{T1}.share: Input should be greater than 0"),
    (f"{ARGS}.tenants.1.model", {}, f"{T1}.model: exactly one of factory, program, checkpoint"),
    (f"{ARGS}.tenants.1.model.x", 1, f"{T1}.model.x: unknown key"),
    (f"{ARGS}.tenants.1.limits", {"rows": 0}, f"{T1}.limits.rows: Input should be greater"),
    (f"{ARGS}.tenants.1.handler", {"use": "txt"}, f"{T1}.handler.use: no handler 'txt'"),
    (f"{ARGS}.tenants.1.handler", {"use": "text"}, f"{T1}.handler.kwargs.tokenizer: Field req"),
    (f"{ARGS}.tenants.1.handler", {"use": "a:B"}, f"{T1}: handler.use 'a:B' is the tenant's own"),
    (
        f"{ARGS}.tenants.1.model",
        {"factory": "m."},
        f"{T1}.model.factory: must look like 'pkg.mod:na",
    ),
    (
        f"{ARGS}.tenants.1.model",
        {"factory": "m.:f"},
        f"{T1}.model.factory: must look like 'pkg.mod",
    ),
    (
        f"{ARGS}.tenants.1.handler",
        {"use": ":B"},
        f"{T1}.handler.use: must look like 'pkg.mod:name'",
    ),
    (f"{ARGS}.scheduler", {"secret_file": ""}, f"{ARGS}.scheduler.secret_file: String should have"),
    (f"{ARGS}.tenants", [], f"{ARGS}.tenants: at least one is needed"),
    (f"{ARGS}.tenants", ..., f"{ARGS}.tenants: missing"),
    (f"{ARGS}.slo_classes.fast.deadline_ms", "soon", f"{ARGS}.slo_classes.fast.deadline_ms: "),
    (f"{ARGS}.scheduler", {"policy": "greedy"}, f"{ARGS}.scheduler.policy: Input should be"),
    (f"{ARGS}.scheduler", {"tcp_port": 1}, f"{ARGS}.scheduler: tcp_port needs secret_file"),
    (ARGS, 3, f"{ARGS}: Input should be a mapping, not 3"),
    ("applications", [], "applications: at least one is needed"),
    ("applications", ..., "applications: missing"),
    ("applications.0.import_path", "x:y", f"applications: none with import_path {IMPORT_PATH}"),
    ("applications.0.route_prefx", "/", "applications.0.route_prefx: unknown key"),
    (
        "applications.0.route_prefix",
        "api",
        "applications.0.route_prefix: must look like '/' or",
    ),
    (
        "applications.0.route_prefix",
        "/a/",
        "applications.0.route_prefix: must look like '/' or",
    ),
    ("applications.0.route_prefix", "/{a}", "applications.0.route_prefix: must look like '/' or "),
    ("http_options.root_path", "a", "http_options.root_path: Input should be ''"),
    ("applications.0.runtime_env", {"nope": 1}, "applications.0.runtime_env.nope: unknown key"),
    ("applications.0.runtime_env", [1], "applications.0.runtime_env: Input should be a mapping"),
    (
        "applications.0.runtime_env",
        {"env_vars": {"A": 1}},
        "applications.0.runtime_env.env_vars.A: Input should be a valid string, not 1",
    ),
    ("applications.0.runtime_env", {"pip": 5}, "applications.0.runtime_env.pip: Input should be"),
    (
        "applications.0.runtime_env",
        {"config": {"setup_timeout_seconds": "x"}},
        "applications.0.runtime_env.config.setup_timeout_seconds: Input should be a valid integer",
    ),
    ("logging_config", {"log_level": "LOUD"}, "logging_config.log_level: Input should be"),
    ("applications.0.host", "h", "applications.0.host: unknown key"),
    ("applications.0.deployments", [{"nam": 1}], "applications.0.deployments.0.nam: unknown key"),
    ("http_options.prot", 1, "http_options.prot: unknown key"),
    ("http_options.port", "high", "http_options.port: Input should be a valid integer, not 'high'"),
    ("http_options.port", 0, "http_options.port: Input should be greater than or equal to 1, not"),
    (
        f"{ARGS}.tenants.1.model",
        {"checkpoint": "x", "architecture": "zzz"},
        f"{T1}.model.architecture: Input should be 'bert', 'minilm', 'mlp' or 'resnet18', not 'zzz",
    ),
    ("http_options.port", 70_000, "http_options.port: Input should be less than or equal to 65535"),
    ("logging_config.access_log", 1, "logging_config.access_log: unknown key"),
    ("proxy_location", "Here", "proxy_location: Input should be 'Disabled', 'HeadOnly' or"),
    ("aplications", [], "aplications: unknown key"),
]


@pytest.mark.parametrize(("path", "value", "line"), BAD, ids=[f"{p}={v}" for p, v, _ in BAD])
def test_bad_configs_name_the_key(tmp_path, path, value, line):
    code, said = validate(tmp_path, changed(path, value))
    assert code == 1
    assert said.startswith(line)


DEPLOYMENT = "applications.0.deployments"
NAN, HUGE, LONG = float("nan"), 10**400, 16**6000
#: (path, value, what is allowed, the value as shown)
ODD = [
    (f"{T1}.limits", {"rows": True}, "limits.rows: Input should be a valid integer", "True"),
    (f"{T1}.limits", {"rows": 2.0}, "limits.rows: Input should be a valid integer", "2.0"),
    (f"{T1}.limits", {"tokens": "8"}, "limits.tokens: Input should be a valid integer", "'8'"),
    (f"{T1}.limits", {"rows": 0}, "limits.rows: Input should be greater than or equal to 1", "0"),
    (f"{T1}.share", True, "share: Input should be a valid number", "True"),
    (f"{T1}.share", NAN, "share: Input should be a finite number", "nan"),
    (f"{T1}.share", HUGE, "share: Input should be a valid number", "1000"),
    (f"{ARGS}.device", {"memory_mib": HUGE}, "less than or equal to 16777216", "1000"),
    (f"{ARGS}.device", {"memory_mib": LONG}, "less than or equal to 16777216", ""),
    (f"{ARGS}.pool", {"replicas": 0}, "Input should be greater than or equal to 1", "0"),
    (f"{ARGS}.pool", {"replicas": -1}, "Input should be greater than or equal to 1", "-1"),
    (f"{ARGS}.scheduler", {"admission": 1}, "admission: Input should be a valid boolean", "1"),
    (f"{ARGS}.scheduler", {"preemption_bound_ms": 1e-9}, "greater than or equal to 0.001", "1e-09"),
    (f"{ARGS}.slo_classes.fast.deadline_ms", -NAN, "Input should be a finite number", "nan"),
    (f"{ARGS}.slo_classes.fast.deadline_ms", 1e-9, "greater than or equal to 0.001", "1e-09"),
    (f"{T1}.model.kwargs", {"a": [{"b": NAN}]}, "kwargs.a.0.b: Input should be a finite", "nan"),
    (f"{T1}.model.kwargs", {"a": date(2020, 1, 1)}, "kwargs.a: input was not a valid J", "date"),
    (f"{T1}.model.kwargs", {1: 2}, "model.kwargs.1: Input should be a valid string", "1"),
    (DEPLOYMENT, [{"num_replicas": 0}], "greater than or equal to 1 or 'auto'", "0"),
    (DEPLOYMENT, [{"num_replicas": -2}], "0.num_replicas: Input should be greater than or", "-2"),
    (DEPLOYMENT, [{"num_replicas": True}], "Input should be a valid integer or 'auto'", "True"),
    (DEPLOYMENT, [{"max_ongoing_requests": True}], "Input should be a valid integer", "True"),
    ("http_options.port", True, "http_options.port: Input should be a valid integer", "True"),
    ("http_options.request_timeout_s", NAN, "Input should be a finite number", "nan"),
    ("target_capacity", True, "target_capacity: Input should be a valid number", "True"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "allowed", "shown"), ODD)
def test_odd_values_are_refused_with_what_is_allowed(tmp_path, path, value, allowed, shown):
    # Not by way of YAML, which cannot write the longest integers.
    config = yaml.safe_load(changed(path, "HERE"))
    *parents, last = path.split(".")
    at = config
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at[last] = value
    with pytest.raises(ConfigError) as caught:
        config_file._check(config)
    line = str(caught.value)
    assert line.startswith(path)
    assert allowed in line
    assert f", not {shown}" in line
    assert "\n" not in line
    assert "more)" not in line


LEVELS = [*settings.Settings.__subclasses__(), *config_file._Strict.__subclasses__()]


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.__name__)
def test_every_level_is_strict_and_every_number_has_two_bounds(level):
    rules = level.model_config
    assert (rules["extra"], rules["strict"], rules["allow_inf_nan"]) == ("forbid", True, False)
    bounds = [{"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}]

    def check(schema, path):
        if isinstance(schema, list):
            schema = dict(enumerate(schema))
        if not isinstance(schema, dict):
            return
        if schema.get("type") in ("integer", "number"):
            assert all(ends & schema.keys() for ends in bounds), f"{path}: {schema}"
        for key, inner in schema.items():
            check(inner, f"{path}.{key}")

    check(level.model_json_schema(), level.__name__)


def errors(config):
    with pytest.raises(ConfigError) as caught:
        config_file._check(config)
    return str(caught.value).splitlines()


def test_every_error_has_its_line(tmp_path):
    config = copy.deepcopy(CONFIG)
    config["applications"][0]["args"]["tenants"][0] = {"slo": 3}
    lines = [f"{ARGS}.tenants.0.{end}" for end in ("name: missing", "model: missing")]
    slo = f"{ARGS}.tenants.0.slo: Input should be a valid string, not 3"
    config["applications"][0]["args"]["tenants"] += [
        {"name": "b", "slo": "slow", "handler": {"use": "txt"}}, "e", {"name": ["u"], "slo": "fast"}
    ]  # fmt: skip
    more = errors(config)
    assert {*lines, slo} < {*more}
    assert f"{ARGS}.tenants.2.name: 'b' is there twice" in more
    assert f"{ARGS}.tenants.2.slo: no class 'slow' in slo_classes (there are: fast)" in more
    assert any(line.startswith(f"{ARGS}.tenants.2.handler.use: no handler 'txt'") for line in more)
    config["applications"][0]["args"]["tenants"][2:] = []
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    result = RUNNER.invoke(app, ["validate", str(path)])
    assert result.output.splitlines() == [f"{path}: {line}" for line in [*lines, slo]]


def test_at_most_twenty_errors_are_shown():
    config = copy.deepcopy(CONFIG)
    config["applications"][0]["args"]["tenants"] = [{"slo": "fast"}] * 12
    lines = errors(config)
    assert len(lines) == 21
    assert lines[-1] == "and 4 more"


def test_the_only_tenant_with_one_wrong_key_is_one_error():
    """Without its only item the list is too short, too: that is not a second error."""
    config = copy.deepcopy(CONFIG)
    del config["applications"][0]["args"]["tenants"][1]
    config["applications"][0]["args"]["tenants"][0]["share"] = "lots"
    (line,) = errors(config)
    assert line.startswith(f"{ARGS}.tenants.0.share: Input should be a valid number")
    assert line.endswith(", not 'lots'")


def test_errors_of_the_whole_have_their_lines_too():
    config = copy.deepcopy(CONFIG)
    first, second = config["applications"][0]["args"]["tenants"]
    first["slo"], second["name"] = "slow", "a"
    slo, name = errors(config)
    assert slo.startswith(f"{ARGS}.tenants.0.slo: no class 'slow'")
    assert name == f"{ARGS}.tenants.1.name: 'a' is there twice"
    for tenant in (first, second):
        tenant |= {"slo": "fast", "handler": {"use": "txt"}}
    second["name"] = "b"
    paths = [line.partition(": ")[0] for line in errors(config)]
    assert paths == [f"{ARGS}.tenants.{index}.handler.use" for index in (0, 1)]


def test_one_tenant_is_not_tenants(tmp_path):
    config = copy.deepcopy(CONFIG)
    del config["applications"][0]["args"]["tenants"][1]
    assert validate(tmp_path, yaml.safe_dump(config)) == (0, "ok: 1 tenant")


@pytest.mark.parametrize(
    ("import_path", "said"),
    [
        ("typo.app:app", "no module 'typo' here"),
        ("json:dumsp", "no 'dumsp' in module 'json' here"),
        ("json.dumps", None),
        ("json:dumps", None),
    ],
)
def test_the_import_path_of_another_application_is_looked_for(tmp_path, import_path, said):
    config = copy.deepcopy(CONFIG)
    config["applications"].append({"name": "own", "import_path": import_path})
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    result = RUNNER.invoke(app, ["validate", str(path), "--strict"])
    assert result.exit_code == bool(said)
    assert result.stderr == (f"{path}: applications.1.import_path: {said}\n" if said else "")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "applications: missing"),
        ("[]", "applications: missing"),
        ("a: [1", "line 1, column 6: "),
        ("a: b\n c: d\n", "line 2, column 3: mapping values are not allowed here"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: key 'a' is there twice"),
        ("a: !!python/object/apply:os.getcwd []", "line 1, column 4: could not determine"),
        ("\tx: 1", "line 1, column 1: "),
        (b"a: \xff", "not UTF-8"),
        (b"a: \x00", "not valid YAML: "),
        ('a: "\\ud800"', "not valid YAML: 'utf-8' codec can't encode character '\\ud800'"),
        ('"\\udc00": 1', "not valid YAML: 'utf-8' codec can't encode character '\\udc00'"),
        ("a: " + "9" * 5000, "not valid YAML: "),
        ("[" * 5000, "not valid YAML: "),
        ("applications: &x [*x]", "not valid YAML: more than 1000000 values, those of aliases in"),
    ],
)
def test_text_that_is_no_config(tmp_path, text, line):
    code, said = validate(tmp_path, text)
    assert code == 1
    assert said.startswith(line)


def test_missing_file(tmp_path):
    result = RUNNER.invoke(app, ["validate", str(tmp_path / "none.yaml")])
    assert result.exit_code == 1
    assert result.output == f"{tmp_path / 'none.yaml'}: No such file or directory\n"


def test_load_app_config_gives_both(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    config, settings = load_app_config(path)
    assert config == CONFIG
    assert [tenant.name for tenant in settings.tenants] == ["a", "b"]
    path.write_text("x: 1")
    with pytest.raises(ConfigError, match=r"serve\.yaml: "):
        load_app_config(path)


def test_validate_loads_neither_ray_nor_torch(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    code = (
        "import sys; from coissue.deployments.cli.main import app; "
        f"app(['validate', {str(path)!r}], standalone_mode=False); "
        "print(sorted({'ray', 'torch', 'tokenizers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["ok: 2 tenants", "[]"]


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("name", ["minimal", "demo", "backbone", "empty"])
def test_shipped_configs_are_good(tmp_path, monkeypatch, name):
    """The minimal one from any folder, whatever is there."""
    if name == "minimal":
        monkeypatch.chdir(tmp_path)
    options = ["--strict"] if name == "minimal" else []
    result = RUNNER.invoke(app, ["validate", str(CONFIGS / f"{name}.yaml"), *options])
    assert (result.exit_code, result.stdout[:4]) == (0, "ok: ")
    assert name != "minimal" or result.stderr == ""


# --- what is not on this machine ----------------------------------------------------------------

CHECKPOINT = {"checkpoint": "none.safetensors", "architecture": "mlp"}
TEXT = {"use": "text", "kwargs": {"tokenizer": "none.json"}}
#: (key of a tenant, its value, what is said of it)
LACKS = [
    ("model", {"factory": "typo:fn"}, "model.factory: no module 'typo' here"),
    ("model", {"factory": "typo.models:fn"}, "model.factory: no module 'typo' here"),
    ("model", {"factory": "team.typo:fn"}, "model.factory: no module 'team.typo' here"),
    ("model", {"factory": "team.models:fm"}, "model.factory: no 'fm' in module 'team.models' here"),
    ("model", {"factory": "plain.models:fn"}, "model.factory: no module 'plain.models' here"),
    ("model", {"factory": "plain:fn"}, "model.factory: no module 'plain', only a folder here"),
    ("model", {"factory": "math.models:fn"}, "model.factory: no module 'math.models' here"),
    ("model", {"program": "none.pt2"}, "model.program: no file 'none.pt2' here"),
    ("model", CHECKPOINT, "model.checkpoint: no file 'none.safetensors' here"),
    ("handler", {"use": "team.typo:Own"}, "handler.use: no module 'team.typo' here"),
    ("handler", TEXT, "handler.kwargs.tokenizer: no file 'none.json' here"),
    ("model", {"factory": "team.models:fn"}, None),
    ("model", {"factory": "plain.deep.models:fn"}, None),
    ("model", {"factory": "plain.deep.star:fm"}, None),
    ("model", {"factory": "math:sqrt"}, None),
    ("model", {"factory": "coissue.kernels.ir:Program"}, None),
    ("model", {"program": "team/models.py"}, None),
]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (f"{ARGS}.scheduler", {"record_to": "none/run.jsonl"}, "scheduler.record_to"),
        ("applications.0.runtime_env", {"working_dir": "none"}, "runtime_env.working_dir"),
    ],
)
def test_folders_that_are_not_here_are_found(tmp_path, monkeypatch, path, value, said):
    """A scheduler that cannot open its record would not start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.yaml").write_text(changed(path, value))
    strict = RUNNER.invoke(app, ["validate", "serve.yaml", "--strict"])
    assert strict.exit_code == 1
    assert f"{said}: no file 'none' here" in strict.stderr
    (tmp_path / "none").mkdir()
    strict = RUNNER.invoke(app, ["validate", "serve.yaml", "--strict"])
    assert said not in strict.stderr


@pytest.mark.parametrize(("key", "value", "said"), LACKS)
def test_what_is_not_here_is_a_warning_or_with_strict_an_error(
    tmp_path, monkeypatch, key, value, said
):
    for name, text in {
        "team/__init__.py": "raise SystemExit('a tenant ran')",
        "team/models.py": "raise SystemExit('a tenant ran')\ndef fn(): ...",
        "plain/deep/models.py": "def fn(): ...",
        "plain/deep/star.py": "from team.models import *",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load(changed(f"{T1}.{key}", value))
    config["applications"][0]["args"]["tenants"][1]["isolation"] = (
        "dedicated" if "Own" in str(value) else "shared"
    )
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    known = set(sys.modules)
    usual = RUNNER.invoke(app, ["validate", "serve.yaml"])
    strict = RUNNER.invoke(app, ["validate", "serve.yaml", "--strict"])
    assert not {"team", "plain"} & (set(sys.modules) - known)
    assert (usual.exit_code, usual.stdout) == (0, "ok: 2 tenants\n")
    assert usual.stderr == (f"serve.yaml: warning: {T1}.{said}\n" if said else "")
    assert (strict.exit_code, strict.stdout) == ((1, "") if said else (0, usual.stdout))
    assert strict.stderr == (f"serve.yaml: {T1}.{said}\n" if said else "")


def test_a_missing_secret_file_is_named(tmp_path):
    config = changed(f"{ARGS}.scheduler", {"tcp_port": 1, "secret_file": "none/secret"})
    (tmp_path / "serve.yaml").write_text(config)
    result = RUNNER.invoke(app, ["validate", str(tmp_path / "serve.yaml"), "--strict"])
    assert result.stderr.endswith(f": {ARGS}.scheduler.secret_file: no file 'none/secret' here\n")


# --- status -------------------------------------------------------------------------------------


@pytest.fixture
def serve():
    """Serves one answer on a free port of 127.0.0.1: `serve(status, body) -> url`."""
    servers = []

    def start(status, body):
        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def test_status_table(serve):
    failed = {"name": "a", "version": 2, "state": "failed", "reason": "too [big]", "slo_class": "s"}
    ready = {
        "name": "b", "version": 1, "state": "ready", "reason": "", "slo_class": "interactive",
        "deadline_ms": 100.0, "handler": "text", "requests": 12_345, "in_time": 0.99871,
        "p99_ms": 45.678,
    }  # fmt: skip
    url = serve(200, json.dumps({"tenants": [failed, ready], "scheduler": {}}).encode())
    result = RUNNER.invoke(app, ["status", "--url", url], env={"COLUMNS": "100"})
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "a 2 failed" in lines
    assert "a: too [big]" in lines
    assert "b 1 ready 100 ms 12345 99.87% 45.68 ms text" in lines
    assert "does not run" not in result.output
    narrow = RUNNER.invoke(app, ["status", "--url", url], env={"COLUMNS": "80"}).output
    assert " ".join(narrow.splitlines()[4].split()) == lines[4]


def test_status_shows_a_config_that_does_not_run(serve):
    wrong = "args.tenants.0.slo: no class 'x' in slo_classes\nargs.pool.b[d]: unknown key\n"
    url = serve(200, json.dumps({"tenants": [], "deploy_error": wrong}).encode())
    result = RUNNER.invoke(app, ["status", "--url", url], env={"COLUMNS": "80"})
    assert result.exit_code == 1
    assert result.output.endswith(f"The config deployed last does not run:\n{wrong}")


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (503, b"{}", "no status: HTTP 503"),
        (200, b"<html>", "no status: this is not coissue"),
        (200, b"[]", "no status: this is not coissue"),
        (200, b'{"tenants": [], "scheduler": {"error": "gone"}}', "scheduler: gone"),
    ],
)
def test_status_errors_are_one_line(serve, status, body, line):
    result = RUNNER.invoke(app, ["status", "--url", serve(status, body)])
    assert result.exit_code == 1
    assert line in result.output.splitlines()[-1]


def test_trace_saves_the_timeline(serve, tmp_path):
    data = b'{"traceEvents": [{"ph": "M"}, {"ph": "X"}]}'
    url, path = serve(200, data), tmp_path / "trace.json"
    result = RUNNER.invoke(app, ["trace", str(path), "--url", url])
    assert (result.exit_code, path.read_bytes()) == (0, data)
    assert result.output == f"{path}: 2 events; open it in https://ui.perfetto.dev\n"
    result = RUNNER.invoke(app, ["trace", str(tmp_path / "no" / "trace.json"), "--url", url])
    assert result.exit_code == 1
    assert result.output.startswith(f"{tmp_path}/no/trace.json: No such file or directory\n")


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (404, b'{"error": "no route"}', "no timeline: HTTP 404"),
        (502, b"<html>", "no timeline: HTTP 502"),
        (200, b"[]", "no timeline: "),
    ],
)
def test_trace_without_a_timeline_is_one_line(serve, tmp_path, status, body, line):
    url, path = serve(status, body), tmp_path / "trace.json"
    result = RUNNER.invoke(app, ["trace", str(path), "--url", url])
    assert result.exit_code == 1
    assert result.output.startswith(f"{url}: {line}")
    assert len(result.output.splitlines()) == 1
    assert not path.exists()


def test_a_port_that_does_not_speak_http_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet():
            with server.accept()[0] as peer:
                peer.sendall(b"+OK ready\r\n")
                peer.recv(1000)

        thread = threading.Thread(target=greet)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        result = RUNNER.invoke(app, ["status", "--url", url])
        thread.join()
    assert result.exit_code == 1
    assert result.output == f"{url}: no status: what listens there does not speak HTTP\n"


@pytest.mark.parametrize("port", ["1_0", "\u0661", "\xb2", "high", "70000"])
def test_odd_ports_are_one_line(port):
    result = RUNNER.invoke(app, ["status", "--url", f"http://127.0.0.1:{port}"])
    assert result.exit_code == 1
    assert result.output.startswith(f"http://127.0.0.1:{port}: no status: Port ")
    said = "no Ray at" if port == "70000" else "--address: .* must look like host:port"
    with pytest.raises(up.UpError, match=said):
        up._check_reachable(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "text",
    ["a: 2020-99-99", 'a: !!int "zz"', 'a: !!bool "zz"', 'a: !!timestamp "zz"', "a: !!set [1]"],
)
def test_scalars_that_are_not_what_their_tag_says_are_one_line(tmp_path, text):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_app_config(path)


def test_aliases_that_mean_billions_are_refused_at_once(tmp_path):
    levels = [f"{b}: &{b} [{','.join(['*' + a] * 10)}]" for a, b in pairwise("abcdefghi")]
    text = "\n".join(["a: &a [x]", *levels, "applications: *i"])
    code, line = validate(tmp_path, text)  # read one by one they would take hours
    assert (code, line) == (
        1,
        "not valid YAML: more than 1000000 values, those of aliases included",
    )


def test_aliases_of_what_is_small_are_fine(tmp_path):
    same = copy.deepcopy(CONFIG)
    tenants = same["applications"][0]["args"]["tenants"]
    tenants[1]["limits"] = tenants[0]["limits"] = {"rows": 4}
    dumped = yaml.safe_dump(same)
    assert "*id001" in dumped
    assert validate(tmp_path, dumped) == (0, "ok: 2 tenants")


@pytest.mark.parametrize(
    ("deployment", "line"),
    [
        ({"name": "Nope"}, "name: there are: Control, Pool"),
        ({"name": "Control", "num_replicas": 2}, "num_replicas: Control is one replica by design"),
        ({"name": "Control", "num_replicas": "auto"}, "num_replicas: Control is one replica"),
        ({"name": "Control", "autoscaling_config": {"max_replicas": 2}}, "num_replicas: Control"),
        ({"name": "Pool", "max_ongoing_requests": 5}, "max_ongoing_requests: set args.pool.ongo"),
        ({"name": "Pool", "num_replicas": 2}, None),
    ],
)
def test_deployments_that_cannot_be_are_refused(tmp_path, deployment, line):
    config = copy.deepcopy(CONFIG)
    config["applications"][0]["deployments"] = [deployment]
    code, said = validate(tmp_path, yaml.safe_dump(config))
    if line is None:
        assert (code, said) == (0, "ok: 2 tenants")
    else:
        assert said.startswith(f"applications.0.deployments.0.{line}")


@pytest.mark.parametrize("name", ["", "a/b c", "-a", "a" * 65, "a\n"])
def test_names_of_applications(tmp_path, name):
    config = copy.deepcopy(CONFIG)
    config["applications"][0]["name"] = name
    assert validate(tmp_path, yaml.safe_dump(config))[1].startswith(
        "applications.0.name: 1 to 64 of A-Z a-z 0-9 . _ - are possible, not "
    )


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"http_options": {"host": "nosuchhost.invalid"}}, "http_options.host: 'nosuchhost.inva"),
        ({"http_options": {"host": "203.0.113.7"}}, "http_options.host: '203.0.113.7' is no addr"),
        ({"proxy_location": "Disabled"}, "proxy_location: Disabled serves no HTTP"),
    ],
)
def test_up_says_at_once_what_serve_finds_out_late(change, line):
    with pytest.raises(up.UpError) as error:
        up._check_http({**CONFIG, **change}, None)
    assert str(error.value).startswith(line)
    up._check_http(CONFIG, None)


def test_odd_files_are_one_line_for_every_command(tmp_path):
    binary, long = tmp_path / "binary", tmp_path / ("a" * 300)
    binary.write_bytes(b"\xff\xfe\x00")
    for words, line in (
        (["validate", long], f"{long}: File name too long"),
        (["replay", long], f"{long}: File name too long"),
        (["replay", binary], f"{binary}: not UTF-8"),
        (["simulate", tmp_path], f"{tmp_path}: Is a directory"),
        (["simulate", "--costs", binary], f"{binary}: not a cost table, as a device's cache has"),
        (["explain", binary, "t"], f"{binary}: not UTF-8"),
    ):
        result = RUNNER.invoke(app, [*map(str, words)])
        assert (result.exit_code, len(result.output.splitlines())) == (1, 1), result.output
        assert result.output.startswith(line)


@pytest.mark.parametrize(
    ("at", "key"), [("device", "cache"), ("scheduler", "record_to"), ("tenants.1.model", "program")]
)
def test_paths_have_no_nul(tmp_path, at, key):
    text = changed(f"{ARGS}.{at}", {key: "a\0b"})
    assert validate(tmp_path, text)[1] == f"{ARGS}.{at}.{key}: a NUL character cannot be in a path"


def test_words_of_a_tenant_reach_the_terminal_without_control_characters(serve):
    tenant = {"name": "t", "state": "failed", "reason": "bad \x1b[2J \n [red]end"}
    url = serve(200, json.dumps({"tenants": [tenant]}).encode())
    shown = RUNNER.invoke(app, ["status", "--url", url], env={"COLUMNS": "200"}).output
    assert "\x1b" not in shown
    assert r"bad \x1b[2J \n [red]end" in shown


def test_up_needs_a_route():
    config = copy.deepcopy(CONFIG)
    config["applications"][0]["route_prefix"] = None
    with pytest.raises(up.UpError, match=r"applications\.0\.route_prefix: `coissue up` needs one"):
        up._check_http(config, None)


def test_an_early_ctrl_c_leaves_no_traceback():
    """While everything is still being imported."""
    script = (
        "import os, signal, sys\n"
        "from coissue.deployments.cli import entry\n"
        "class Finder:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "entry.run()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
