from __future__ import annotations

import asyncio
import json

import pytest
from fake_scheduler import serving_fake

from srt.http_server import HttpServer
from srt.openapi_document import openapi_document
from srt.openapi_schemas import SCHEMAS
from srt.sampling_params import LIMITS, NAMES, SamplingParams, SamplingParamsError
from srt.server_args import ServerArgs


def served_routes():
    """Method and path of every route; a HEAD is a GET without its body."""
    routes = HttpServer(ServerArgs()).app.router.routes()
    return {(r.method, r.resource.canonical) for r in routes if r.method != "HEAD"}


def test_every_route_is_described_and_nothing_else():
    paths = openapi_document()["paths"]
    described = {(method.upper(), path) for path, item in paths.items() for method in item}
    assert described == served_routes()


def test_the_description_is_valid_openapi():
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(openapi_document())


def test_every_schema_is_used_and_every_reference_leads_somewhere():
    text = json.dumps(openapi_document())
    for name in SCHEMAS:
        assert f'"#/components/schemas/{name}"' in text, name
    assert text.count("#/components/schemas/") == sum(
        text.count(f'"#/components/schemas/{name}"') for name in SCHEMAS
    )


def test_the_description_needs_no_key_and_holds_no_secret(tmp_path):
    async def scenario():
        args = {"api_key": "s3cret", "model_path": "/private/model", "port": 4321}
        async with serving_fake(tmp_path, **args) as http:
            status, document = await http.get("/openapi.json")
            assert status == 200 and document == json.loads(json.dumps(openapi_document()))
            for secret in ("s3cret", "/private/model", "4321"):
                assert secret not in json.dumps(document)
            assert (await http.get("/v1/models"))[0] == 401

    asyncio.run(scenario())


def test_the_sampling_parameters_are_those_of_the_parser_with_its_limits():
    schema = SCHEMAS["SamplingParams"]
    assert list(schema["properties"]) == list(NAMES)
    assert schema["additionalProperties"] is False
    for name in LIMITS:
        for member in schema["properties"][name]["anyOf"]:
            for key, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
                if key in member and abs(member[key]) < 2**31 - 1:
                    with pytest.raises(SamplingParamsError, match=name):
                        SamplingParams.parse({"max_new_tokens": 9, name: member[key] + step})
                if key in member and step:
                    SamplingParams.parse({"max_new_tokens": 2**31 - 1, name: member[key]})


def test_defaults_that_are_described_are_the_parsers():
    properties = SCHEMAS["SamplingParams"]["properties"]
    shown = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    assert SamplingParams.parse(shown) == SamplingParams.parse({})


# Other spellings of a path that is open, and of one that is not.
SPELLINGS = [
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/ready/..%2fv1/models",
    "/metrics/../../v1/models",
    "//v1/models",
    "/v1//models",
    "/%76%31/models",
    "/v1/models?/health",
    "/v1/models#/health",
    "/healthy",
    "/metrics/x",
    "/openapi.json/../v1/models",
    "http://x/v1/models",
]


@pytest.mark.parametrize("path", SPELLINGS)
def test_no_spelling_of_a_path_gets_around_the_key(tmp_path, path):
    async def scenario():
        async with serving_fake(tmp_path, api_key="key", admin_api_key="admin") as http:
            request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            reader, writer = await http.connect(request.encode())
            answer = await asyncio.wait_for(reader.read(), 10)
            assert b" 401 " in answer[:20] or b" 400 " in answer[:20], answer
            writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/flush_cache", "/flush%5Fcache", "/x/../flush_cache"])
def test_no_spelling_of_an_admin_path_takes_the_clients_key(tmp_path, path):
    async def scenario():
        async with serving_fake(tmp_path, api_key="key", admin_api_key="admin") as http:
            lines = [f"POST {path} HTTP/1.1", "Host: x", "Authorization: Bearer key"]
            request = "\r\n".join([*lines, "Content-Length: 0", "Connection: close", "", ""])
            reader, writer = await http.connect(request.encode())
            answer = await asyncio.wait_for(reader.read(), 10)
            assert b" 401 " in answer[:20] or b" 404 " in answer[:20], answer
            writer.close()

    asyncio.run(scenario())
