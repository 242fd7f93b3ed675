"""Whatever a client sends is read or refused with a text; nothing else."""

import contextlib
import json
import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.http import code_judge
from sandbox.http.codec import request_from_data, request_to_data, result_from_data, result_to_data
from sandbox.jail import wire
from sandbox.outcomes import read_result
from sandbox.request import ExecutionRequest
from tests import derived

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
NAMES = ["type", "solution", "input", "expected_output", "sub_id", "code", "stdin", "limits", "seed", "call_id"]
objects = st.dictionaries(st.sampled_from(NAMES), anything | st.sampled_from(["python", "cpp"]), max_size=8)


@pytest.mark.long
@settings(max_examples=120, deadline=None)
@given(anything | objects)
def test_a_submission_is_read_or_refused(data: object):
    try:
        submission = code_judge.read_submission(data, derived.program())
    except code_judge.BadInput as error:
        assert str(error)
    else:
        assert isinstance(submission.request.code, str)


@settings(max_examples=40, deadline=None)
@given(anything | st.fixed_dictionaries({"submissions": st.lists(anything | objects, max_size=3)}))
def test_a_batch_is_read_entry_by_entry_or_refused(data: object):
    try:
        _, entries = code_judge.read_batch(data, derived.program())
    except code_judge.BadInput as error:
        assert str(error)
    else:
        assert len(entries) == len(data["submissions"])  # type: ignore[index]
        json.dumps([entry for entry in entries if isinstance(entry, dict)])


@settings(max_examples=120, deadline=None)
@given(anything | objects | st.fixed_dictionaries({"code": st.text(max_size=20), "limits": anything}))
def test_a_request_is_read_or_refused(data: object):
    try:
        request = request_from_data(data)
    except ValueError as error:
        assert str(error)
    else:
        assert request_from_data(request_to_data(request)) == request


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=400))
def test_a_workers_reply_is_read_or_refused(data: bytes):
    with contextlib.suppress(ValueError, struct.error):
        read_result(ExecutionRequest(code=""), memoryview(data))


@settings(max_examples=50, deadline=None)
@given(st.text(), st.text(), st.integers(0, 2**32 - 1))
def test_requests_survive_the_wire(code: str, stdin: str, seed: int):
    request = ExecutionRequest(code=code, stdin=stdin, seed=seed)
    packed = msgpack.packb(request_to_data(request), unicode_errors="surrogatepass")
    assert request_from_data(msgpack.unpackb(packed, unicode_errors="surrogatepass")) == request


def test_results_survive_the_wire():
    head = wire.Result(7, 256, 0, 0, 0, 0.1, 0.05, 1 << 20, 3, 0, 0, 3, 0, 2, 0, 0).pack()
    result = read_result(ExecutionRequest(code="", call_id="x"), memoryview(head + b"out" + b"er"))
    assert (result.stdout, result.stderr, result.exit_status, str(result.outcome)) == ("out", "er", 1, "error")
    assert result_from_data(result_to_data(result)) == result
