"""Requests that the API's own schema describes, and worse: an answer each, and nothing changed."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import altered, damaged
from tests.server.conftest import job_file

#: Requests of each kind that the slow tests send; `TLORA_FX_FUZZ_CASES=1500` for many.
CASES = int(os.environ.get("TLORA_FX_FUZZ_CASES", "300"))
TEXT = st.text(max_size=12) | st.sampled_from(
    ["a", "alice.a", "..", "%2e%2e%2f", "../../etc/passwd", "\0", "x" * 3000, "-1", "NaN", "😀"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SAFE = "!#$&'()*+,:;=@-._~"


def of_schema(schema: dict[str, Any], whole: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema describes, mostly."""
    if "$ref" in schema:
        schema = whole["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        fields = {name: of_schema(part, whole) for name, part in schema["properties"].items()}
        return st.fixed_dictionaries(fields) | st.fixed_dictionaries({}, optional=fields) | JSON
    if kind == "object":
        return st.dictionaries(
            TEXT, of_schema(schema.get("additionalProperties", {}), whole), max_size=3
        )
    simple = {"integer": st.integers(-5, 2000), "boolean": st.booleans(), "string": TEXT}
    return simple.get(str(kind), JSON) | JSON


def requests(whole: dict[str, Any]) -> st.SearchStrategy[tuple[str, str, dict, Any, dict]]:
    """A method, a path, parameters, a body, headers."""

    def one(path: str, method: str, operation: dict[str, Any]) -> st.SearchStrategy[Any]:
        given = {"path": {}, "query": {}, "header": {}}
        for parameter in operation.get("parameters", ()):
            kind = given[parameter["in"]]
            kind[parameter["name"]] = of_schema(parameter["schema"], whole)
        # A log that is followed ends with its job.
        given["query"].pop("follow", None)
        body: st.SearchStrategy[Any] = st.none() | st.binary(max_size=30)
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            body = of_schema(schema, whole)
        parts = (st.fixed_dictionaries({}, optional=given[where]) for where in ("query", "header"))
        return st.tuples(
            st.just(method), st.just(path), st.fixed_dictionaries(given["path"]), body, *parts
        )

    return st.one_of(
        one(path, method, operation)
        for path, methods in whole["paths"].items()
        for method, operation in methods.items()
        if path != "/api/v1/stream"
    )


def sent(it: Any, drawn: Any) -> Any:
    """Send what was drawn, as far as HTTP can carry it."""
    from urllib.parse import quote

    method, path, names, body, query, headers = drawn
    for name, value in names.items():
        path = path.replace(f"{{{name}}}", quote(str(value), safe=SAFE, errors="replace"))
    plain = {k: str(v).encode("latin-1", "replace").strip(b" \r\n\t\0") for k, v in headers.items()}
    plain = {k: bytes(c for c in v if 32 <= c < 127) for k, v in plain.items()}
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    params = {k: str(v).encode("utf-8", "replace") for k, v in query.items()}
    if not isinstance(body, bytes):
        plain["Content-Type"] = b"application/json"
    return it.ask(method.upper(), path, "alice", params=params, content=content, headers=plain)


def require_answered(it: Any, drawn: Any) -> None:
    """It is no failure of the service, and an error has a body that says what to do."""
    answer = sent(it, drawn)
    assert answer.status_code < 500, (drawn, answer.text)
    if answer.status_code >= 400:
        assert answer.json()["code"].startswith("T0"), (drawn, answer.text)


@pytest.fixture
def fuzzed(asked):
    it = asked()
    it.add("alice")
    it.add("bob")
    it.submit(job_file("b"), user="bob")
    return it


def fuzz(it: Any, examples: int) -> None:
    whole = it.client.app.openapi()

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(requests(whole))
    def each(drawn: Any) -> None:
        before = it.state()
        require_answered(it, drawn)
        # No job file is drawn that has a job, so that nothing is taken; uploads' hashes are wrong.
        assert it.state() == before

    each()


def test_no_request_that_the_schema_describes_breaks_the_service(fuzzed):
    """Nor does it change anything: it has no right to, or is wrong."""
    fuzz(fuzzed, 15)


@pytest.mark.slow
def test_no_request_of_many_breaks_the_service(fuzzed):
    """The same with 300, or as many as are asked for."""
    fuzz(fuzzed, CASES)


GOOD = job_file("a", max_length=32, eval_split=0.1, eval_steps=2, schedule={"max_slowdown": 2.0})
BODY = {"job_file": GOOD, "files": {}, "priority": 0}
SUBMISSIONS = st.one_of(
    altered(yaml.safe_load(GOOD)).map(lambda document: {**BODY, "job_file": dumped(document)}),
    damaged(GOOD.encode()).map(lambda b: {**BODY, "job_file": b.decode("utf-8", "replace")}),
    altered(BODY),
).map(lambda body: json.dumps(body).encode("utf-8", "surrogatepass")) | damaged(
    json.dumps(BODY).encode()
)


def dumped(document: Any) -> str:
    """As YAML, or as JSON where YAML has no form."""
    try:
        return str(yaml.safe_dump(document))
    except (yaml.YAMLError, UnicodeError, RecursionError):
        return json.dumps(document)


def fuzz_submissions(it: Any, caplog: Any, examples: int) -> dict[int, int]:
    """How often each status was answered; a submission that is refused has changed nothing."""
    answered: dict[int, int] = {}

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(SUBMISSIONS)
    def each(content: bytes) -> None:
        before = it.state()
        key = {"Idempotency-Key": f"k{sum(answered.values())}", "Content-Type": "application/json"}
        answer = it.ask("POST", "/api/v1/submissions", "alice", content=content, headers=key)
        answered[answer.status_code] = answered.get(answer.status_code, 0) + 1
        assert answer.status_code < 500, (content, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["code"].startswith("T0"), (content, answer.text)
            assert it.state() == before

    with caplog.at_level(logging.ERROR):
        each()
    assert not [record for record in caplog.records if record.exc_info]
    return answered


def test_no_damaged_submission_breaks_the_service(fuzzed, caplog):
    """What is refused leaves no job, no file and no traceback."""
    assert fuzz_submissions(fuzzed, caplog, 25)[422] > 5


@pytest.mark.slow
def test_no_damaged_submission_of_many_breaks_the_service(fuzzed, caplog):
    """The same with 300, or as many as are asked for."""
    assert fuzz_submissions(fuzzed, caplog, CASES)[422] > CASES // 3
