"""What clients do wrong, through HAProxy: a 4xx that names the field, counted; nothing is lost."""

from __future__ import annotations

import json
import socket
from collections import Counter

import numpy as np
import pytest
from serving import Reply, poll

GOOD = {"inputs": {"input": [[0.5] * 8]}}
PLAIN = "/tenants/mlp-a"
INFER = "/v2/models/mlp-a/infer"
RAW = {"content-type": "application/octet-stream"}
LENGTH = "inference-header-content-length"


def tensor(**changed):
    return {"name": "input", "shape": [1, 8], "datatype": "FP32", "data": [0.5] * 8} | changed


def oip(**changed):
    return {"inputs": [tensor(**changed)]}


def binary(num_bytes, claimed=32):
    """An OIP body whose tensor has `num_bytes` and says it has `claimed`."""
    given = tensor(parameters={"binary_data_size": claimed})
    del given["data"]
    head = json.dumps({"inputs": [given]}).encode()
    return head + bytes(num_bytes), {LENGTH: str(len(head))}


def deep(depth=100_000):
    return '{"inputs": {"input": ' + "[" * depth + "]" * depth + "}}"


#: name: (verb, path, body, headers, status, words of the sentence, tenant and reason counted).
BAD = {
    "wrong name": ("POST", INFER, oip(name="x"), {}, 400, ["'x'", "input"], "malformed"),
    "wrong plain name": ("POST", PLAIN, {"inputs": {"x": [[1]]}}, {}, 400, ["'x'"], "malformed"),
    "wrong dtype": ("POST", INFER, oip(datatype="INT64"), {}, 400, ["datatype"], "malformed"),
    "unknown dtype": ("POST", INFER, oip(datatype="FP33"), {}, 400, ["datatype"], "malformed"),
    "wrong shape": ("POST", INFER, oip(shape=[8, 1]), {}, 400, ["shape"], "malformed"),
    "too many rows": (
        "POST", INFER, oip(shape=[65, 8], data=[0.0] * 520), {}, 413, ["rows", "65"], "too_large",
    ),
    "no rows": ("POST", INFER, oip(shape=[0, 8], data=[]), {}, 400, ["input", "0"], "malformed"),
    "no plain rows": ("POST", PLAIN, {"inputs": {"input": []}}, {}, 400, ["input"], "malformed"),
    "ragged": ("POST", PLAIN, {"inputs": {"input": [[1], []]}}, {}, 400, ["input"], "malformed"),
    "missing shape": ("POST", INFER, {"inputs": [{"name": "x"}]}, {}, 400, ["shape"], "malformed"),
    "missing inputs": ("POST", INFER, {}, {}, 400, ["inputs"], "malformed"),
    "missing input": ("POST", PLAIN, {"inputs": {}}, {}, 400, ["'input'"], "malformed"),
    "not JSON": ("POST", PLAIN, "{'inputs'", {}, 400, ["JSON"], "malformed"),
    "not UTF-8": ("POST", PLAIN, b"\xff\xfe", {}, 400, ["body"], "malformed"),
    "deep JSON": ("POST", PLAIN, deep(), {}, 400, ["body", "deeply"], "malformed"),
    "raw bytes left over": ("POST", PLAIN, bytes(33), RAW, 400, ["33"], "malformed"),
    "truncated binary": ("POST", INFER, *binary(31), 400, ["input"], "malformed"),
    "binary left over": ("POST", INFER, *binary(33), 400, ["binary_data_size"], "malformed"),
    "lying binary size": ("POST", INFER, *binary(32, 10**15), 400, ["input"], "malformed"),
    "header length beyond the body": (
        "POST", INFER, b"{}", {LENGTH: "1000000"}, 400, [LENGTH], "malformed",
    ),
    "header length negative": ("POST", INFER, b"{}", {LENGTH: "-1"}, 400, [LENGTH], "malformed"),
    "bad x-slo-ms": ("POST", PLAIN, GOOD, {"x-slo-ms": "soon"}, 400, ["x-slo-ms"], "malformed"),
    "unknown tenant": ("POST", "/tenants/nobody", GOOD, {}, 404, ["'nobody'"], "unknown_tenant"),
    "unknown model": ("GET", "/v2/models/nobody", None, {}, 404, ["'nobody'"], "unknown_tenant"),
    "unknown version": (
        "POST", "/v2/models/mlp-a/versions/9/infer", oip(), {}, 404, ["'9'"], "unknown_tenant",
    ),
    "unknown route": ("GET", "/v3", None, {}, 404, ["'/v3'"], "unknown_route"),
    "wrong verb": ("GET", PLAIN, None, {}, 405, ["POST"], "wrong_verb"),
    "failed tenant": ("POST", "/tenants/unimportable", GOOD, {}, 503, ["failed"], "failed"),
}  # fmt: skip


def tenant_of(path):
    named = [part for part in path.split("/") if part in ("mlp-a", "strict", "unimportable")]
    return named[0] if named else ""


def refuse(up, case):
    verb, path, body, headers, status, words, reason = BAD[case]
    reply = up.ask(verb, path, body, headers)
    assert reply.status == status, reply.body
    for word in words:
        assert word.lower() in reply.error.lower(), reply.error
    assert len(reply.error) < 500
    return tenant_of(path), reason


def check_good(up):
    assert up.ask("POST", PLAIN, GOOD).status == 200


@pytest.mark.parametrize("case", BAD)
def test_bad_request_is_refused_with_a_sentence_and_a_good_one_works_after_it(up, case):
    refuse(up, case)
    check_good(up)


def test_refusals_are_counted_by_tenant_and_reason(up):
    def counts():
        return {
            key: up.metric("coissue_rejections_total", tenant=key[0], reason=key[1])
            for key in expected
        }

    expected = Counter((tenant_of(BAD[case][1]), BAD[case][-1]) for case in BAD)
    # Those of other tests may still be on their way, but not behind one that only this test makes.
    mark = {"tenant": "strict", "reason": "wrong_verb"}
    marks = up.metric("coissue_rejections_total", **mark)
    up.get("/tenants/strict")
    poll("reported", lambda: up.metric("coissue_rejections_total", **mark) == marks + 1)
    before = counts()
    for case in BAD:
        refuse(up, case)
    want = {key: before[key] + count for key, count in expected.items()}
    poll("all refusals are counted", lambda: counts() == want)


def test_nan_policy(up):
    body = np.full((1, 8), np.nan, np.float32).tobytes()
    assert up.ask("POST", PLAIN, body, RAW).status == 200
    reply = up.ask("POST", "/tenants/strict", body, RAW)
    assert reply.status == 400
    assert "'input'" in reply.error
    assert "NaN" in reply.error


def send_raw(up, data) -> Reply:
    """Bytes as they are; the answer, however the connection ends."""
    with socket.create_connection(("127.0.0.1", up.port), timeout=60) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
            head, found, rest = received.partition(b"\r\n\r\n")
            lines = head.decode().lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
            if found and len(rest) >= int(headers.get("content-length", 0)):
                return Reply(int(lines[0].split()[1]), headers, rest)
    return Reply(0, {}, received)


def test_claim_of_a_gigabyte_is_refused_before_it_is_sent(up):
    head = f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ncontent-length: {1 << 30}\r\n\r\n"
    reply = send_raw(up, head.encode())
    assert reply.status == 413
    assert "body" in reply.error
    check_good(up)


@pytest.mark.parametrize("length", ["-5", "abc", "9" * 30])
def test_length_that_is_none_is_refused(up, length):
    head = f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
    assert send_raw(up, head.encode()).status in (400, 413)
    check_good(up)


def test_body_that_ends_early_harms_nobody(up):
    before = up.scheduler()["outcomes"]["completed"]
    head = f"POST {PLAIN} HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n"
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", up.port), timeout=60) as connection:
            connection.sendall(head.encode() + b'{"inputs":')
    check_good(up)
    assert up.scheduler()["outcomes"]["completed"] == before + 1
