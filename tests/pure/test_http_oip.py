"""Open Inference Protocol: what is understood, what is refused and with which words."""

from __future__ import annotations

import json

import numpy as np
import pytest
from http_fakes import TENANTS, tenant
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coissue.deployments.channel.frames import NUMPY_DTYPES
from coissue.deployments.http import oip, plain, tensors
from coissue.deployments.http.errors import STATUS, HttpError
from coissue.kernels.ir import DTYPE_BYTES, Dim, R, T
from coissue.scheduler.messages import Reason

M = TENANTS["m"]
GOOD = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}


def request(*inputs, **fields):
    return {"inputs": list(inputs) or [GOOD], **fields}


def with_(**changes):
    """The good request with fields of its input changed; None removes one."""
    changed = {**GOOD, **changes}
    return request({key: value for key, value in changed.items() if value is not None})


def parse(info, body, tail=b"", header=None):
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    if tail and header is None:
        header = str(len(body)).encode()
    return oip.parse_infer(info, body + tail, header)


def refuse(info, body, tail=b"", header=None):
    with pytest.raises(HttpError) as caught:
        parse(info, body, tail, header)
    assert caught.value.status == 400
    return str(caught.value)


def nest(depth):
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2, 3, 4]], [1.0, 2e0, 3, 4]])
def test_nested_and_flat_data_are_the_same(data):
    array = parse(M, with_(data=data)).inputs["x"]
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, [[1, 2, 3, 4]])


def test_parameters_and_id():
    body = request(id="é", parameters={"timeout": 1500, "priority": 3, "mine": {"any": [1]}})
    call = parse(M, body)
    assert (call.id, call.budget_ns, call.priority) == ("é", 1_500_000, 3)
    assert parse(M, request(parameters={"timeout": 0})).budget_ns is None


BAD = [
    (b"", "body: empty"),
    (b"hello", "body: not valid JSON"),
    (b"[]", "body: expected `object`, got `array`"),
    (b"{}", "body: object missing required field `inputs`"),
    (b'{"inputs": []}', "inputs: expected `array` of length >= 1"),
    (b'{"inputs": [{"name": "\xff"}]}', "body: not UTF-8"),
    (b'{"inputs": [{"data": ' + nest(100_000) + b"}]}", "body: nested too deeply"),
    (b'{"ignored": ' + nest(100_000) + b"}", "body: nested too deeply"),
    (json.dumps(request()).encode() + b"x", "body: not valid JSON: trailing characters"),
    (with_(name=None), "inputs[0]: object missing required field `name`"),
    (with_(shape=None), "inputs[0]: object missing required field `shape`"),
    (with_(datatype=None), "inputs[0]: object missing required field `datatype`"),
    (with_(data=None), "inputs[0]: neither data nor parameters.binary_data_size is given"),
    (with_(name="z"), "inputs[0].name: 'z' is no input, there are: x"),
    (with_(name=7), "inputs[0].name: expected `str`, got `int`"),
    (with_(datatype="FP64"), "inputs[0].datatype: 'FP64' where FP32 is needed"),
    (with_(datatype="BYTES", data=["a"]), "inputs[0].datatype: BYTES tensors are not supported"),
    (with_(shape=[-1, 4]), "inputs[0].shape[0]: expected `int` >= 0"),
    (with_(shape=[True, 4]), "inputs[0].shape[0]: expected `int`, got `bool`"),
    (with_(shape=[1.5, 4]), "inputs[0].shape[0]: expected `int`, got `float`"),
    (with_(shape=[2**63, 4]), "inputs[0].shape[0]: expected `int`"),
    (with_(shape=[1] * 17), "inputs[0].shape: expected `array` of length <= 16"),
    (with_(shape=[2**33, 2**33]), "inputs[0].data: 4 values where the shape needs 73786976294838"),
    (with_(shape=[0, 4], data=[]), "inputs[0].shape: [0, 4] is empty"),
    (with_(data=[]), "inputs[0].data: 1 values where the shape needs 4"),
    (with_(data=[1, 2, 3]), "inputs[0].data: 3 values where the shape needs 4"),
    (with_(data=[1, 2, 3, 4, 5]), "inputs[0].data: 5 values where the shape needs 4"),
    (with_(data=[[1, 2], [3, 4]]), "inputs[0].data: nested as [2, 2], but shape is [1, 4]"),
    (with_(data=[[1], [2, 3, 4]]), "inputs[0].data: lists of different lengths at one depth"),
    (with_(data=[[1, [2], 3, 4]]), "inputs[0].data[0][1]: expected `float`, got `array`"),
    (with_(data=[[[1, 2, 3, 4]]]), "inputs[0].data: a list nested 2 deep is needed, not 3"),
    (with_(data=7), "inputs[0].data: 1 values where the shape needs 4"),
    (with_(data="1,2,3,4"), "inputs[0].data: a list nested 2 deep is needed, not 0"),
    (with_(data=[1, 2, 3, "4"]), "inputs[0].data[3]: expected `float`, got `str`"),
    (with_(data=[1, 2, 3, True]), "inputs[0].data[3]: expected `float`, got `bool`"),
    (with_(data=[1, 2, 3, None]), "inputs[0].data[3]: expected `float`, got `null`"),
    (with_(data=[1, 2, 3, float("nan")]), "body: not valid JSON: invalid character"),
    (with_(data=[1, 2, 3, 1e39]), "inputs[0].data: a value is out of range for FP32"),
    (request(GOOD, GOOD), "inputs[1].name: 'x' is given twice"),
    (request(id=7), "id: expected `str | null`, got `int`"),
    (request(parameters={"timeout": -1}), "parameters.timeout: expected `int` >= 0"),
    (request(parameters={"timeout": 2**62}), "parameters.timeout: expected `int` <= 86400000000"),
    (request(parameters={"timeout": "1"}), "parameters.timeout: expected `int`, got `str`"),
    (request(parameters={"priority": -1}), "parameters.priority: expected `int` >= 0"),
    (request(parameters={"priority": 17}), "parameters.priority: expected `int` <= 16"),
    (request(parameters={"priority": 10**30}), "parameters.priority: expected `int` <= 16"),
    (request(parameters={"priority": "1"}), "parameters.priority: expected `int`, got `str`"),
    (request(parameters=[]), "parameters: expected `object`, got `array`"),
    (request(outputs=[{"name": "q"}]), "outputs[0].name: 'q' is no output or given twice"),
    (request(outputs=[{"name": "y"}] * 2), "outputs[1].name: 'y' is no output or given twice"),
    (
        request(outputs=[{"name": "y", "parameters": {"classification": 3}}]),
        "outputs[0].parameters.classification: not supported",
    ),
    (
        with_(data=None, parameters={"binary_data_size": 16}),
        "inputs[0].parameters.binary_data_size: needs Inference-Header-Content-Length",
    ),
    (
        with_(data=None, parameters={"shared_memory_region": "r"}),
        "inputs[0].parameters.shared_memory_region: shared memory is not supported",
    ),
]


@pytest.mark.parametrize(("body", "sentence"), BAD, ids=[sentence[:50] for _, sentence in BAD])
def test_bad_json_names_the_field(body, sentence):
    assert refuse(M, body).startswith(sentence)


HALF = "an escape is half of a surrogate pair"
HALVES = [
    (request(id="\ud800"), "id"),
    (request(id="a\udc00b"), "id"),
    (request(id="\U0001f600\\\ud83d"), "id"),
    (request(id="\ud800\ud800"), "id"),
    (with_(name="\ud800x"), "name"),
    (with_(datatype="\ud800"), "datatype"),
    (with_(data=[1, [2, "\ud800"]]), "data"),
    (request(outputs=[{"name": "\udfff"}]), "name"),
    (request(parameters={"mine": "\ud800"}), "mine"),
    # Not of `id`, which is before.
    (request(id="1", **{"\ud800": 1}), "body"),
    (request(id="a: ", more=[[1], "\ud800"]), "body"),
    (b'{"id" : "\\uD800"}', "id"),
    (b'{"\\ud800": 1}', "body"),
    (b'"\\ud800', "body"),
]


@pytest.mark.parametrize(("body", "field"), HALVES)
def test_half_of_a_surrogate_pair_names_its_field(body, field):
    assert refuse(M, body) == f"{field}: {HALF}"


def test_half_of_a_surrogate_pair_in_plain_bodies():
    for parse_plain, body, field in (
        (lambda body: plain.parse_json(M, body), {"inputs": {"\ud800": [[1]]}}, "inputs"),
        (plain.parse_payload, {"text": "\ud800"}, "text"),
        (plain.parse_payload, {"texts": ["good", "\ud800"]}, "texts"),
    ):
        with pytest.raises(HttpError, match=f"^{field}: {HALF}"):
            parse_plain(json.dumps(body).encode())


@pytest.mark.parametrize("text", ["\U0001f600", "\\ud800", '"\\ud83d', "\ud7ff\ue000"])
def test_text_that_only_looks_like_half_of_a_pair(text):
    assert parse(M, request(id=text)).id == text
    broken = json.dumps(request(id=text)).encode() + b"x"
    assert refuse(M, broken).startswith("body: not valid JSON: trailing")


INTEGERS = {"u8": 256, "i8": -129, "i16": 2**15, "i32": 2**31, "i64": 2**63}


@pytest.mark.parametrize(("dtype", "value"), INTEGERS.items())
def test_integers_out_of_range(dtype, value):
    info = tenant(inputs={"x": (dtype, R)})
    body = request(
        {"name": "x", "shape": [1], "datatype": tensors.DATATYPES[dtype], "data": [value]}
    )
    assert "a value is out of range for" in refuse(info, body)
    body["inputs"][0]["data"] = [1.0]
    assert "inputs[0].data[0]: expected `int`, got `float`" in refuse(info, body)


@pytest.mark.parametrize("name", ["half", "brain"])
def test_short_floats_are_binary_only(name):
    info = TENANTS[name]
    datatype = tensors.DATATYPES[info.inputs[0].dtype]
    tensor = {"name": "x", "shape": [1, 2], "datatype": datatype, "data": [1, 2]}
    assert f"{datatype} has no JSON form" in refuse(info, request(tensor))
    del tensor["data"]
    tensor["parameters"] = {"binary_data_size": 4}
    message = refuse(info, request(tensor), b"\0" * 4)
    assert message == f"outputs.y: {datatype} has no JSON form, use binary data"
    call = parse(info, request(tensor, parameters={"binary_data_output": True}), b"\0" * 4)
    assert call.inputs["x"].dtype.itemsize == 2


def binary(size, **fields):
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32"}
    return request({**tensor, "parameters": {"binary_data_size": size}, **fields})


FOUR = np.arange(4, dtype="<f4").tobytes()


def test_binary_input_is_read_in_place_where_aligned():
    for pad in range(4):
        body = json.dumps(binary(16)).encode() + b" " * pad
        array = parse(M, body, FOUR).inputs["x"]
        np.testing.assert_array_equal(array, [[0, 1, 2, 3]])
        assert array.flags.aligned


LYING = [
    (binary(16), FOUR[:8], None, "says 16 bytes, 8 are left"),
    (binary(2**62), FOUR, None, "says 4611686018427387904 bytes, 16 are left"),
    (binary(-1), FOUR, None, "inputs[0].parameters.binary_data_size: expected `int` >= 0"),
    (binary("16"), FOUR, None, "binary_data_size: expected `int | null`, got `str`"),
    (binary(16), FOUR * 2, None, "16 bytes more than the inputs' binary_data_size say"),
    (binary(12), FOUR[:12], None, "inputs[0]: 12 bytes where FP32 [1, 4] needs 16"),
    (binary(16, shape=[2**40, 2**40]), FOUR, None, "16 bytes where FP32"),
    (binary(16, data=[1, 2, 3, 4]), FOUR, None, "binary_data_size: data is given too"),
    (binary(16), FOUR, b"100000", "says 100000 bytes of JSON, the body has"),
    (binary(16), FOUR, b"7", "body: input data was truncated"),
    (binary(16), FOUR, b"-5", "Inference-Header-Content-Length: not a number of bytes"),
    (binary(16), FOUR, b"1e3", "Inference-Header-Content-Length: not a number of bytes"),
    (binary(16), FOUR, b"9" * 5000, "Inference-Header-Content-Length: not a number of bytes"),
    (binary(16), FOUR, b"\xd9\xa1", "Inference-Header-Content-Length: not a number of bytes"),
]


@pytest.mark.parametrize(("body", "tail", "header", "sentence"), LYING)
def test_lying_lengths(body, tail, header, sentence):
    assert sentence in refuse(M, body, tail, header)


def test_header_length_zero_is_raw():
    call = parse(M, b"", FOUR * 3, b"0")
    assert call.inputs["x"].shape == (3, 4)
    assert [(port.name, as_binary) for port, as_binary in call.outputs] == [("y", True)]
    assert "15 bytes are not a whole number of rows of 16" in refuse(M, b"", FOUR[:15], b"0")
    assert "raw data need a model with one input" in refuse(TENANTS["two"], b"", FOUR, b"0")
    words = tenant(inputs={"x": ("i64", R, T)}, tokens_limit=8)
    assert parse(words, b"", b"\0" * 40, b"0").inputs["x"].shape == (1, 5)


def test_bool_bytes_must_be_bits():
    tensor = {
        "name": "x", "shape": [1, 3], "datatype": "BOOL", "parameters": {"binary_data_size": 3}
    }  # fmt: skip
    call = parse(TENANTS["mask"], request(tensor), b"\1\0\1")
    assert call.inputs["x"].tolist() == [[True, False, True]]
    assert "must be 0 or 1" in refuse(TENANTS["mask"], request(tensor), b"\1\2\1")


def read_answer(answer):
    """{output: array} of a formatted answer, as a client reads it, and its JSON part."""
    status, headers, body = answer
    assert status == 200
    length = dict(headers).get(b"inference-header-content-length")
    head, tail = (body, b"") if length is None else (body[: int(length)], body[int(length) :])
    described = json.loads(head)
    names = {datatype: dtype for dtype, datatype in tensors.DATATYPES.items()}
    arrays = {}
    for output in described["outputs"]:
        dtype = NUMPY_DTYPES[names[output["datatype"]]]
        size = output.get("parameters", {}).get("binary_data_size")
        if size is None:
            flat = np.array(output["data"], dtype)
        else:
            flat, tail = np.frombuffer(tail[:size], dtype), tail[size:]
        arrays[output["name"]] = flat.reshape(output["shape"])
    assert not tail
    return arrays, described


def finite(dtype):
    if NUMPY_DTYPES[dtype].kind != "f":
        return hnp.from_dtype(NUMPY_DTYPES[dtype])
    return hnp.from_dtype(NUMPY_DTYPES[dtype], allow_nan=False, allow_infinity=False)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPE_BYTES)), binary_in=st.booleans())
def test_round_trip_of_any_tensor(data, dtype, binary_in):
    if dtype in tensors.BINARY_ONLY:
        binary_in = True
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=4))
    array = data.draw(hnp.arrays(NUMPY_DTYPES[dtype], shape, elements=finite(dtype)))
    dims = (R, *map(Dim, shape[1:]))
    info = tenant(inputs={"x": (dtype, *dims)}, outputs={"x": (dtype, *dims)})
    tensor = {"name": "x", "shape": shape, "datatype": tensors.DATATYPES[dtype]}
    if binary_in:
        tensor["parameters"] = {"binary_data_size": array.nbytes}
    else:
        tensor["data"] = array.tolist() if data.draw(st.booleans()) else array.ravel().tolist()
    wanted = binary_in or data.draw(st.booleans())
    body = request(tensor, parameters={"binary_data_output": wanted})
    call = parse(info, body, array.tobytes() if binary_in else b"")
    np.testing.assert_array_equal(call.inputs["x"], array, strict=True)
    arrays, _ = read_answer(oip.format_infer(info, call, call.inputs))
    np.testing.assert_array_equal(arrays["x"], array, strict=True)


def answered(body, header=None):
    """Parsed, or refused with 400; any other exception fails the test."""
    try:
        parse(M, body, header=header)
    except HttpError as error:
        status = error.status
    else:
        status = 400
    assert status == 400


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=300), header=st.none() | st.integers(0, 400))
def test_any_bytes_are_answered(body, header):
    """Whatever comes in: a parsed call or an `HttpError`, nothing else."""
    answered(body, None if header is None else str(header).encode())


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(value=JSON_VALUES, place=st.sampled_from([*GOOD, "id", "outputs", "parameters", "inputs"]))
def test_any_value_in_any_place_is_answered(value, place):
    body = with_(**{place: value}) if place in GOOD else {**request(), place: value}
    answered(json.dumps(body).encode())


def test_chosen_outputs_keep_their_order_and_form():
    info = tenant(outputs={"a": ("f32", R), "b": ("i32", R, 2), "c": ("f32", R)})
    body = request(
        id="7",
        outputs=[{"name": "c", "parameters": {"binary_data": True}}, {"name": "b"}],
        parameters={"binary_data_output": False},
    )
    call = parse(info, body)
    made = {
        "a": np.zeros(1, np.float32),
        "b": np.array([[1, 2]], np.int32),
        "c": np.array([np.nan], np.float32),
    }
    arrays, described = read_answer(oip.format_infer(info, call, made))
    assert list(arrays) == ["c", "b"]
    assert np.isnan(arrays["c"]).all()
    assert (described["id"], described["model_name"]) == ("7", "m")
    assert described["model_version"] == "1"


def test_binary_data_false_overrides_the_default():
    body = request(
        outputs=[{"name": "y", "parameters": {"binary_data": False}}],
        parameters={"binary_data_output": True},
    )
    assert [as_binary for _, as_binary in parse(M, body).outputs] == [False]


def test_nan_is_null_in_json():
    call = parse(M, request())
    _, _, body = oip.format_infer(M, call, {"y": np.array([[np.nan, np.inf, 1, 2]], np.float32)})
    assert json.loads(body)["outputs"][0]["data"] == [None, None, 1, 2]


def test_metadata_and_config_say_which_dimensions_are_open():
    info = tenant(inputs={"x": ("i64", R, T)}, outputs={"y": ("f32", R, 2)}, tokens_limit=9)
    metadata, config = oip.model_metadata(info), oip.model_config(info)
    assert metadata["inputs"] == [{"name": "x", "datatype": "INT64", "shape": [-1, -1]}]
    assert config["max_batch_size"] == 8
    assert config["input"] == [{"name": "x", "data_type": "TYPE_INT64", "dims": [-1]}]
    assert config["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}]
    merged = tenant(outputs={"y": ("f32", Dim(2, rows=1))})
    assert oip.model_config(merged)["max_batch_size"] == 8
    fixed = tenant(outputs={"y": ("f32", 3)})
    assert oip.model_config(fixed)["max_batch_size"] == 0


def test_plain_json_is_bounded_by_the_limits():
    """More values than the tenant's limits allow are refused before they are decoded."""
    rows = [[0] * 4] * 9
    with pytest.raises(HttpError, match=r"inputs\.x: 36 values, .* allows 32"):
        plain.parse_json(M, json.dumps({"inputs": {"x": rows}}).encode())


def test_every_reason_has_a_status():
    assert {reason.value for reason in Reason} <= set(STATUS)
    assert all(400 <= status < 600 for status in STATUS.values())
