"""Handlers: what they make of payloads and outputs; their faults stay with their tenant."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
import warnings

import numpy as np
import pytest
from http_fakes import Server, drive, tenant
from tokenizers import Tokenizer, models, pre_tokenizers

from coissue.deployments.handlers import (
    HANDLERS_KEPT,
    Classes,
    LoadedHandlers,
    Own,
    Text,
    check_handler,
    classify,
    load_handler,
    pack_arrays,
    unpack_arrays,
)
from coissue.deployments.http.errors import HttpError
from coissue.deployments.settings import HandlerSettings, TenantSettings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing Ray
    from coissue.deployments.tenant import DedicatedTenant

VOCABULARY = {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3, "day": 4}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The path of a tokenizer.json that, like many, asks for a fixed padded length."""
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.enable_padding(length=128, pad_id=0, pad_token="[PAD]")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words.save(str(path))
    return str(path)


def run(awaitable):
    return asyncio.run(awaitable)


def refuse(awaitable, reason="malformed"):
    with pytest.raises(HttpError) as caught:
        run(awaitable)
    assert caught.value.reason == reason
    return str(caught.value)


def test_text_becomes_ids_and_mask_as_long_as_the_longest(tokenizer):
    handler = Text(tokenizer)
    arrays = run(handler.preprocess({"texts": ["good", "a bad day"]}))
    assert arrays["input_ids"].tolist() == [[2, 0, 0], [1, 3, 4]]
    assert arrays["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1]]
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int64)}
    assert run(handler.preprocess({"text": "good"}))["input_ids"].tolist() == [[2]]


def test_text_is_cut_at_max_tokens(tokenizer):
    arrays = run(Text(tokenizer, max_tokens=2).preprocess({"text": "good bad day"}))
    assert arrays["input_ids"].tolist() == [[2, 3]]


def test_text_inputs_can_be_renamed_and_left_out(tokenizer):
    names = {"ids": "words", "mask": None, "types": "kinds"}
    arrays = run(Text(tokenizer, inputs=names).preprocess({"text": "good"}))
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "words": [[2]],
        "kinds": [[0]],
    }


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        ([], 'body: either {"text"'),
        ({}, 'body: either {"text"'),
        ({"text": "a", "texts": ["b"]}, 'body: either {"text"'),
        ({"texts": []}, "texts: a list of at least one string"),
        ({"texts": "good"}, "texts: a list of at least one string"),
        ({"texts": ["a", 1]}, "texts: only strings are texts"),
        ({"text": None}, "text: only strings are texts"),
    ],
)
def test_bad_texts(tokenizer, payload, sentence):
    assert refuse(Text(tokenizer).preprocess(payload)).startswith(sentence)


def test_long_texts_are_too_large(tokenizer):
    handler = Text(tokenizer, max_chars=10)
    assert "longer than 10 characters" in refuse(
        handler.preprocess({"texts": ["123456", "123456"]}), "too_large"
    )


def test_text_answers(tokenizer):
    handler = Text(tokenizer, labels=["up", "down"])
    outputs = {"logits": np.array([[0, 0], [0, np.log(3)]], np.float32)}
    even = {"label": "up", "scores": {"up": 0.5, "down": 0.5}}
    odd = {"label": "down", "scores": {"up": 0.25, "down": 0.75}}
    assert run(handler.postprocess(outputs, {"texts": ["", ""]})) == {"results": [even, odd]}
    first = {"logits": outputs["logits"][:1]}
    assert run(handler.postprocess(first, {"text": ""})) == even


def test_text_without_labels_answers_the_output(tokenizer):
    answer = run(Text(tokenizer).postprocess({"y": np.array([[1, 2]])}, {"text": ""}))
    assert answer["outputs"].tolist() == [1, 2]


def test_text_through_http(tokenizer):
    server = Server(
        handlers={"m": Text(tokenizer, labels=["a", "b", "c", "d"], inputs={"ids": "x"})}
    )
    reply = server.post("/tenants/m", {"text": "good bad day day"})
    # The model knows nothing of a mask: the sentence says so.
    assert (reply.status, reply.error) == (
        500,
        "inputs: 'attention_mask', given by the handler, is no input, there are: x",
    )


def test_classes():
    handler = Classes(labels=["no", "yes"])
    arrays = run(handler.preprocess({"inputs": {"x": [[1, 2]]}}))
    assert arrays["x"].tolist() == [[1, 2]]
    answer = run(handler.postprocess({"y": np.array([[0.0, 0.0], [-1e30, 5]])}, {}))
    assert answer == {
        "labels": ["no", "yes"],
        "probabilities": [{"no": 0.5, "yes": 0.5}, {"no": 0.0, "yes": 1.0}],
    }


def test_classes_with_the_name_of_the_input():
    arrays = run(Classes(labels=["a"], input="x").preprocess({"inputs": [[1]]}))
    assert list(arrays) == ["x"]


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        ([], "body: "),
        ({"inputs": 3}, "body: "),
        ({"inputs": {"x": [[1], [1, 2]]}}, "inputs.x: lists of different lengths"),
        ({"inputs": {"x": [[2**70]]}}, "inputs.x: whole numbers of at most 64 bits"),
        ({"inputs": {"x": ["a"]}}, "inputs.x: only numbers"),
        ({"inputs": {"x": None}}, "inputs.x: only numbers"),
        ({"inputs": {"x": {"a": 1}}}, "inputs.x: only numbers"),
        ({"inputs": {"x": [2**70]}}, "inputs.x: "),
    ],
)
def test_bad_class_payloads(payload, sentence):
    assert refuse(Classes(labels=["a"]).preprocess(payload)).startswith(sentence)


def test_labels_that_do_not_fit_the_model():
    with pytest.raises(HttpError, match=r"the model gives \[1, 3\], handler.labels 2") as caught:
        classify(np.zeros((1, 3)), ["a", "b"])
    assert caught.value.status == 500


def test_unknown_output():
    handler = Classes(labels=["a"], output="z")
    assert "no 'z', there are: y" in refuse(handler.postprocess({"y": 1}, {}), "handler_failed")


# --- a tenant's own class -----------------------------------------------------------------------


class Stop(BaseException):
    pass


class Team:
    def __init__(self, factor=1):
        self.factor = factor

    def preprocess(self, payload):
        if payload == "client's fault":
            raise ValueError("x: must not be negative")
        if payload == "our fault":
            raise KeyError("secret")
        if payload == "leave":
            sys.exit(4)
        if payload == "cancelled":
            raise asyncio.CancelledError
        if payload == "stop":
            raise Stop
        if payload == "surrogate":
            raise ValueError("bad \ud800 text" + "x" * 10_000_000)
        if payload == "empty":
            raise ValueError
        if payload == "nonsense":
            return [1]
        return {"x": np.full((1, 4), self.factor, np.float32)}

    async def postprocess(self, outputs):
        if outputs["y"][0, 0] == 13:
            raise ValueError("secret")
        return {"first": outputs["y"][0, 0]}


@pytest.fixture
def team(monkeypatch):
    module = types.ModuleType("team_code")
    module.Team = Team
    module.Half = type("Half", (), {"preprocess": lambda self, payload: {}})
    module.Leaves = type("Leaves", (Team,), {"__init__": lambda self: sys.exit()})
    monkeypatch.setitem(sys.modules, "team_code", module)


def own(use="team_code:Team", **kwargs):
    return load_handler(HandlerSettings(use=use, kwargs=kwargs))


def test_own_handler_sync_and_async(team):
    server = Server(handlers={"m": own(factor=3)})
    assert server.post("/tenants/m", {}).json == {"first": 3.0}


def test_own_handler_faults(team, caplog):
    server = Server(handlers={"m": own(), "two": own(factor=13)})
    reply = server.post("/tenants/m", "client's fault")
    assert (reply.status, reply.error) == (400, "x: must not be negative")
    reply = server.post("/tenants/m", "our fault")
    assert (reply.status, reply.error) == (
        500,
        "handler team_code:Team failed in preprocess: KeyError",
    )
    assert "secret" in caplog.text
    assert server.post("/tenants/m", "nonsense").status == 500
    for payload, name in (
        ("leave", "SystemExit"),
        ("cancelled", "CancelledError"),
        ("stop", "Stop"),
    ):
        reply = server.post("/tenants/m", payload)
        assert (reply.status, reply.error) == (
            500,
            f"handler team_code:Team failed in preprocess: {name}",
        )
    server = Server(handlers={"m": own(factor=13)})
    reply = server.post("/tenants/m", {})
    assert (reply.status, reply.error) == (
        500,
        "handler team_code:Team failed in postprocess: ValueError",
    )
    assert Server().post("/tenants/m", {"inputs": {"x": [[1, 2, 3, 4]]}}).status == 200


def test_what_a_handler_says_is_one_printable_sentence(team):
    server = Server(handlers={"m": own()})
    reply = server.post("/tenants/m", "surrogate")
    assert reply.status == 400
    assert reply.error.startswith("bad \\ud800 textxxx")
    assert len(reply.error) < 3000
    assert server.post("/tenants/m", "empty").error == "rejected by handler team_code:Team"


class Waits(Team):
    """Until the test ends it."""

    async def preprocess(self, payload):
        self.started.set()
        await asyncio.Event().wait()


def waiting():
    handler = Own.__new__(Own)
    handler._use, handler._own = "t:Waits", Waits()
    handler._own.started = asyncio.Event()
    return handler


def test_a_handler_that_waits_ends_with_the_deadline():
    server = Server(handlers={"m": waiting()})
    reply = server.post("/tenants/m", {}, {"x-slo-ms": "50"})
    assert (reply.status, reply.error) == (504, "the deadline passed in the tenant's handler")
    assert server.app.reports._refused == {("m", "expired", False): 1}
    assert not server.app._handled


def test_what_a_handler_makes_of_a_request_that_was_done_is_reported_as_done(team):
    server = Server(handlers={"m": own(factor=13)})
    assert server.post("/tenants/m", {}).status == 500
    assert server.app.reports._refused == {("m", "handler_failed", True): 1}


def test_a_tenant_has_no_more_requests_in_its_handler_than_it_may_have_open():
    handler = waiting()
    server = Server(handlers={"m": handler})
    server.client.directory["m"] = tenant(in_flight_limit=3, deadline_ns=10**12)

    async def scenario():
        first = [
            asyncio.ensure_future(drive(server.app, "POST", "/tenants/m", b"{}")) for _ in "abc"
        ]
        await handler._own.started.wait()
        while server.app._handled["m"] < 3:
            await asyncio.sleep(0)
        refused = await drive(server.app, "POST", "/tenants/m", b"{}")
        for one in first:
            one.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        return refused

    reply = asyncio.run(scenario())
    assert (reply.status, reply.error) == (429, "3 requests of tenant 'm' are in its handler")
    assert not server.app._handled


def test_only_numbers_and_json_leave_a_deployment_of_a_tenants_own():
    class Odd:
        def __reduce__(self):
            return sys.exit, (7,)

    sent = {"a": np.arange(6, dtype=">i2").reshape(2, 3), "b": [[1.5]], "c": np.zeros((0, 4))}
    back = unpack_arrays(pack_arrays(sent))
    for name, value in sent.items():
        np.testing.assert_array_equal(back[name], value)
    for odd in ({"x": Odd()}, {1: [1.0]}, {"x": ["text"]}, {"x": [None]}):
        with pytest.raises(TypeError, match="not numbers"):
            pack_arrays(odd)


class OddText(str):
    """A string whose pickle ends whoever reads it."""

    def __reduce__(self):
        return sys.exit, (7,)

    def __getitem__(self, key):
        raise Stop


class Mute(Exception):
    def __str__(self):
        raise Stop


class Odd(HttpError):
    def __init__(self):
        super().__init__("handler_rejected", "x")
        self.reason = OddText("handler_rejected")

    def __str__(self):
        return OddText("odd")


def test_only_plain_strings_say_what_went_wrong(monkeypatch):
    """Whatever a tenant's exceptions do while they are told, in constructor and methods."""
    Mute.__name__ = OddText("Mute")

    def fail(error):
        raise error()

    module = types.ModuleType("odd_code")
    for error in (Mute, Odd, Stop, asyncio.CancelledError):
        name = error.__name__[0:] if type(error.__name__) is str else "Mute"
        init = {"__init__": lambda self, error=error: fail(error)}
        verbs = {
            "preprocess": lambda self, payload, error=error: fail(error),
            "postprocess": lambda self, outputs, error=error: fail(error),
        }
        setattr(module, f"{name}Init", type("Init", (Team,), init))
        setattr(module, f"{name}Verbs", type("Verbs", (Team,), verbs))
    monkeypatch.setitem(sys.modules, "odd_code", module)

    async def scenario():
        deployment = DedicatedTenant.func_or_class()
        for name in ("Mute", "Odd", "Stop", "CancelledError"):
            init = HandlerSettings(use=f"odd_code:{name}Init").model_dump_json()
            verbs = HandlerSettings(use=f"odd_code:{name}Verbs").model_dump_json()
            said = await deployment.load(init, 0.0)
            assert said.startswith(f"handler odd_code:{name}Init cannot be loaded: ")
            before = {thread for thread in threading.enumerate() if thread.name == "handler"}
            assert await deployment.preprocess(init, b"{}") == (b"", ("failed", said))
            for thread in {t for t in threading.enumerate() if t.name == "handler"} - before:
                await asyncio.to_thread(thread.join, 60)  # nothing of it stays
                assert not thread.is_alive()
            assert await deployment.load(verbs, 0.0) == ""
            arrays = pack_arrays({"y": np.zeros(1)})
            _, before = await deployment.preprocess(verbs, b"{}")
            _, after = await deployment.postprocess(verbs, arrays, b"{}")
            assert "handler_" in before[0]
            assert "handler_" in after[0]
            for text in (said, *before, *after):
                assert type(text) is str

    asyncio.run(scenario())


class Bound(Team):
    """Lives in one thread with a running loop, as connections and clients do."""

    def __init__(self):
        self.factor, self.home = 1, (asyncio.get_running_loop(), threading.get_ident())

    def preprocess(self, payload):
        assert self.home == (asyncio.get_running_loop(), threading.get_ident())
        return super().preprocess(payload)

    async def postprocess(self, outputs):
        assert self.home == (asyncio.get_running_loop(), threading.get_ident())
        return await super().postprocess(outputs)


class Stuck(Team):
    """Its constructor waits for the test."""

    go = threading.Event()

    def __init__(self, number):
        self.go.wait()


def test_constructor_and_methods_share_a_thread_and_a_loop_of_their_own(monkeypatch):
    module = types.ModuleType("own_code")
    module.Bound, module.Stuck, Stuck.go = Bound, Stuck, threading.Event()
    monkeypatch.setitem(sys.modules, "own_code", module)

    async def scenario():
        deployment = DedicatedTenant.func_or_class()
        bound = HandlerSettings(use="own_code:Bound").model_dump_json()
        stuck = [
            HandlerSettings(use="own_code:Stuck", kwargs={"number": n}).model_dump_json()
            for n in range(5)
        ]
        assert await deployment.load(bound, 0.0) == ""
        before = deployment._handlers[bound]
        hanging = [asyncio.ensure_future(deployment.load(one, 0.0)) for one in stuck]
        packed = pack_arrays({"y": np.ones((1, 1))})
        for _ in range(3):  # however many hang
            value, wrong = await deployment.preprocess(bound, b"{}")
            assert wrong is None
            np.testing.assert_array_equal(unpack_arrays(value)["x"], np.ones((1, 4)))
            assert await deployment.postprocess(bound, packed, b"{}") == (b'{"first":1.0}', None)
        assert deployment._handlers[bound] is before
        assert not any(one.done() for one in hanging)
        Stuck.go.set()
        assert await asyncio.gather(*hanging) == [""] * 5
        assert len(deployment._handlers) == HANDLERS_KEPT

    asyncio.run(scenario())


def test_a_constructor_that_never_came_back_is_tried_again(monkeypatch):
    module = types.ModuleType("own_code")
    module.Stuck, Stuck.go = Stuck, threading.Event()
    monkeypatch.setitem(sys.modules, "own_code", module)
    monkeypatch.setattr("coissue.deployments.tenant.SECONDS_MORE", 0.05)

    async def scenario():
        deployment = DedicatedTenant.func_or_class()
        stuck = HandlerSettings(use="own_code:Stuck", kwargs={"number": 1}).model_dump_json()
        said = await deployment.load(stuck, 0.0)
        assert said == "handler own_code:Stuck cannot be loaded: it took longer than 0 s"
        monkeypatch.setattr("coissue.deployments.tenant.SECONDS_MORE", 60.0)
        Stuck.go.set()
        assert await deployment.load(stuck, 0.0) == ""

    asyncio.run(scenario())


class Ending(Team):
    """Stops the loop that it runs in."""

    def preprocess(self, payload):
        asyncio.get_running_loop().stop()
        return super().preprocess(payload)


def test_a_handler_that_stops_its_loop_goes_on(monkeypatch):
    module = types.ModuleType("own_code")
    module.Ending = Ending
    monkeypatch.setitem(sys.modules, "own_code", module)

    async def scenario():
        deployment = DedicatedTenant.func_or_class()
        ending = HandlerSettings(use="own_code:Ending", kwargs={"factor": 1}).model_dump_json()
        assert await deployment.load(ending, 0.0) == ""
        for _ in range(3):
            _, wrong = await deployment.preprocess(ending, b"{}")
            assert wrong is None

    asyncio.run(scenario())


def test_a_client_that_goes_while_the_handler_waits_is_no_fault_of_the_handler():
    handler = waiting()

    async def scenario():
        task = asyncio.ensure_future(handler.preprocess({}))
        await handler._own.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("use", "kwargs", "sentence"),
    [
        ("nothing", {}, "handler.use: no handler 'nothing', there are: classes, text, or pkg.mod"),
        ("text", {}, "handler.kwargs.tokenizer: Field required"),
        ("text", {"tokenizer": "/none"}, "handler text cannot be loaded: no tokenizer file"),
        ("classes", {"labels": [], "x": 1}, "handler.kwargs.x: Extra inputs are not permitted"),
        (
            "no_such_module:X",
            {},
            "handler no_such_module:X cannot be loaded: ModuleNotFoundError: ",
        ),
        ("team_code:Leaves", {}, "handler team_code:Leaves cannot be loaded: SystemExit"),
        (
            "team_code:X",
            {},
            "handler team_code:X cannot be loaded: AttributeError: mod",
        ),
        ("team_code:Team", {"q": 1}, "handler team_code:Team cannot be loaded: "),
        (
            "team_code:Half",
            {},
            "handler team_code:Half cannot be loaded: TypeError: team_",
        ),
    ],
)
def test_handlers_that_cannot_be_loaded_fail_their_tenant_alone(team, use, kwargs, sentence):
    server = Server(handlers={"m": load_handler(HandlerSettings(use=use, kwargs=kwargs))})
    reply = server.post("/tenants/m", {})
    assert reply.status == 503
    assert reply.error.startswith(sentence)
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    assert server.post("/v2/models/m/infer", {"inputs": [tensor]}).status == 200


def test_a_changed_handler_is_loaded_beside_the_one_that_is_served():
    def tenant(*labels):
        handler = {"use": "classes", "kwargs": {"labels": list(labels)}}
        return TenantSettings(name="classes", model={"factory": "a:b"}, slo="s", handler=handler)

    plain = TenantSettings(name="plain", model={"factory": "a:b"}, slo="s")
    loaded, old, new = LoadedHandlers(), tenant("a"), tenant("a", "b")
    loaded.expect([plain, old])
    served = loaded.find("classes", old.handler.model_dump_json())
    assert isinstance(served._handler, Classes)
    loaded.expect([plain, new])
    assert loaded.find("classes", old.handler.model_dump_json()) is served
    assert loaded.find("classes", new.handler.model_dump_json()) is not served
    loaded.expect([plain])
    assert loaded.find("classes", old.handler.model_dump_json()) is not served


def test_a_handler_of_ours_that_fails_is_named(caplog):
    handler = load_handler(HandlerSettings(use="classes", kwargs={"labels": ["a"]}))
    handler._handler._labels = 1  # as if the check had let it pass
    reply = Server(handlers={"m": handler}).post("/tenants/m", {"inputs": {"x": [[1, 2, 3, 4]]}})
    assert (reply.status, reply.error) == (
        500,
        "handler classes failed in postprocess: TypeError",
    )


@pytest.mark.parametrize(
    ("use", "kwargs", "sentence"),
    [
        ("classes", {"labels": 1}, "kwargs.labels: Input should be a list, not '1'"),
        ("classes", {"labels": [["a"], {}]}, "kwargs.labels.0: Input should be a valid string"),
        ("classes", {"labels": ["a"], "input": 3}, "kwargs.input: Input should be a valid string"),
        ("text", {"tokenizer": 5}, "kwargs.tokenizer: Input should be a valid string, not '5'"),
        ("text", {"tokenizer": "t", "max_tokens": "8"}, "kwargs.max_tokens: Input should be a v"),
        ("text", {"tokenizer": "t", "max_tokens": -1}, "kwargs.max_tokens: Input should be gre"),
        ("text", {"tokenizer": "t", "labels": "ab"}, "kwargs.labels: Input should be a list"),
        ("text", {"tokenizer": "t", "inputs": {"idz": "x"}}, "kwargs.inputs.idz"),
        ("text", {"tokenizer": "t", "inputs": {"ids": 1}}, "kwargs.inputs.ids: Input should be"),
    ],
)
def test_wrong_kwargs_are_named_before_anything_is_loaded(use, kwargs, sentence):
    wrong = check_handler(HandlerSettings(use=use, kwargs=kwargs))
    assert wrong.startswith(sentence)
