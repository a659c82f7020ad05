"""What the description at /openapi.json allows and what it forbids, sent to every route of it."""

from __future__ import annotations

import pytest
from fuzz_server import fuzz_settings, fuzzed_server
from hypothesis import given
from hypothesis import strategies as st

from srt.openapi_document import openapi_document

# Asked for after each case of a route that stops the server from generating.
RESUME = "/continue_generation"


def fuzz(tmp_path, num_examples):
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import response_schema_conformance

    with fuzzed_server(tmp_path) as http:
        schema = schemathesis.openapi.from_dict(openapi_document())
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) > 30
        cases = st.one_of(
            *(
                operation.as_strategy(generation_mode=mode)
                for operation in operations
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
                if mode is GenerationMode.POSITIVE or operation.body or operation.query
            )
        )

        @fuzz_settings(num_examples)
        @given(case=cases)
        def run(case):
            response = case.call(base_url=http.url, timeout=10)
            asked_for = response.status_code == 503 and "timeout reached" in response.text
            assert response.status_code < 500 or asked_for, (case, response.text[:300])
            case.validate_response(response, checks=[response_schema_conformance])
            if case.path == "/pause_generation":
                schema[RESUME]["POST"].Case().call(base_url=http.url, timeout=10)

        run()


def test_no_request_that_the_description_knows_is_our_failure(tmp_path):
    fuzz(tmp_path, 100)


@pytest.mark.slow
def test_no_request_that_the_description_knows_is_our_failure_at_length(tmp_path):
    fuzz(tmp_path, 700)
