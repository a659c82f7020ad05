"""Parsing one request's sampling knobs."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from srt.sampling_params import SamplingParams, SamplingParamsError, SamplingSchemaError

ORDER = [
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
]


def error_of(raw) -> str:
    with pytest.raises(SamplingParamsError) as error:
        SamplingParams.parse(raw)
    return str(error.value)


def test_nothing_empty_and_all_nulls_give_the_defaults():
    assert SamplingParams.parse(None) == SamplingParams()
    assert SamplingParams.parse({}) == SamplingParams()
    nulls = dict.fromkeys(ORDER)
    assert SamplingParams.parse(nulls) == SamplingParams(max_new_tokens=None)
    del nulls["max_new_tokens"]
    assert SamplingParams.parse(nulls) == SamplingParams()


def test_every_supported_knob_is_taken_over():
    raw = json.loads("""{"max_new_tokens": 7, "min_new_tokens": 2, "temperature": 0, "top_p": 0.5,
        "top_k": 3, "min_p": 0.1, "frequency_penalty": -2, "presence_penalty": 2,
        "repetition_penalty": 1.5, "stop": ["a", "b"], "stop_token_ids": [5, 6, 5],
        "stop_regex": "x+", "ignore_eos": true, "skip_special_tokens": false,
        "spaces_between_special_tokens": false, "no_stop_trim": true, "n": 2,
        "logit_bias": {"5": 1, "6": -100.0}, "sampling_seed": -9223372036854775808,
        "stream_interval": 4}""")
    assert SamplingParams.parse(raw) == SamplingParams(
        max_new_tokens=7,
        min_new_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        repetition_penalty=1.5,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        stop_regex=("x+",),
        ignore_eos=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        no_stop_trim=True,
        n=2,
        logit_bias={5: 1.0, 6: -100.0},
        sampling_seed=-(2**63),
        stream_interval=4,
    )


def test_params_survive_the_wire():
    params = SamplingParams.parse({"logit_bias": {"5": 1}, "stop": "x", "max_new_tokens": None})
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


def test_a_request_wins_over_given_defaults_and_those_over_the_class():
    defaults = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 5, "min_p": None, "top_k": 0}
    params = SamplingParams.parse({"top_p": 0.5, "temperature": None}, defaults)
    assert params == SamplingParams(temperature=0.6, top_p=0.5, max_new_tokens=5)
    assert SamplingParams.parse({"max_new_tokens": None}, defaults).max_new_tokens is None


def test_an_unknown_name_is_refused_with_the_known_ones_in_order():
    message = error_of({"foo": 1})
    assert message == "unknown field `foo`, expected one of " + ", ".join(f"`{n}`" for n in ORDER)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("seed", "sampling_seed"),
        ("max_tokens", "max_new_tokens"),
        ("max_completion_tokens", "max_new_tokens"),
        ("temprature", "temperature"),
        ("stop_token_id", "stop_token_ids"),
    ],
)
def test_an_unknown_name_like_a_known_one_is_refused_with_a_hint(name, meant):
    assert error_of({name: None}).endswith(f"; did you mean `{meant}`?")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "invalid type: sequence, expected struct SamplingParams"),
        ("x", 'invalid type: string "x", expected struct SamplingParams'),
        ({"temperature": "x"}, 'invalid type: string "x", expected f64 for `temperature`'),
        ({"temperature": True}, "invalid type: boolean `true`, expected f64 for `temperature`"),
        ({"ignore_eos": "yes"}, 'invalid type: string "yes", expected a boolean for `ignore_eos`'),
        ({"ignore_eos": 1}, "invalid type: integer `1`, expected a boolean for `ignore_eos`"),
        (
            {"max_new_tokens": 1.5},
            "invalid type: floating point `1.5`, expected i32 for `max_new_tokens`",
        ),
        ({"max_new_tokens": 8.0}, "floating point `8.0`, expected i32 for `max_new_tokens`"),
        ({"max_new_tokens": "8"}, 'string "8", expected i32 for `max_new_tokens`'),
        ({"max_new_tokens": 2**31}, "invalid value: integer `2147483648`, expected i32"),
        ({"n": True}, "invalid type: boolean `true`, expected i32 for `n`"),
        ({"top_k": 10**30}, "invalid value: integer beyond 64 bits, expected i32 for `top_k`"),
        ({"sampling_seed": 2**63}, "invalid value: integer `9223372036854775808`, expected i64"),
        ({"stop": 5}, "invalid type: integer `5`, expected a sequence for `stop`"),
        ({"stop": ["a", None]}, "invalid type: null, expected a string for `stop`"),
        ({"stop_token_ids": 5}, "invalid type: integer `5`, expected a sequence"),
        ({"stop_token_ids": ["5"]}, 'invalid type: string "5", expected i64 for `stop_token_ids`'),
        ({"logit_bias": [1]}, "invalid type: sequence, expected a map for `logit_bias`"),
        ({"logit_bias": {"1": "x"}}, 'invalid type: string "x", expected f64 for `logit_bias`'),
    ],
)
def test_a_wrong_type_is_a_schema_error_that_names_it(raw, message):
    with pytest.raises(SamplingSchemaError) as error:
        SamplingParams.parse(raw)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1."),
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens must be in [0, max_new_tokens(8)], got 9.",
        ),
        ({"min_new_tokens": -1}, "min_new_tokens must be in [0, max_new_tokens(128)], got -1."),
        (
            {"min_new_tokens": -1, "max_new_tokens": None},
            "min_new_tokens must be at least 0, got -1.",
        ),
        ({"temperature": -0.1}, "temperature must be a non-negative finite number, got -0.1."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0."),
        ({"top_p": 1.01}, "top_p must be in (0, 1], got 1.01."),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"top_k": -2}, "top_k must be -1 (disable) or at least 1, got -2."),
        ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1."),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be in [-2, 2], got 2.1."),
        ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2], got -3.0."),
        (
            {"repetition_penalty": 0},
            "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 0.0.",
        ),
        (
            {"repetition_penalty": 2.5},
            "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 2.5.",
        ),
        ({"n": 0}, "n must be in [1, 128], got 0."),
        ({"n": 129}, "n must be in [1, 128], got 129."),
        ({"stream_interval": 0}, "stream_interval must be at least 1, got 0."),
        ({"stop": ["x"] * 33}, "at most 32 stop strings are allowed, got 33"),
        ({"stop_regex": ["x"] * 33}, "at most 32 stop regexes are allowed, got 33"),
        ({"stop_regex": "é" * 129}, "stop_regex is 258 bytes, over the 256-byte limit"),
        ({"logit_bias": {"a": 1}}, "logit_bias must have token ids as keys, got 'a'."),
        ({"logit_bias": {"1.0": 1}}, "logit_bias must have token ids as keys, got '1.0'."),
        (
            {"json_schema": "{}", "regex": "a"},
            "Only one of json_schema, regex, ebnf, or structural_tag can be set.",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_with_value_and_limit(raw, message):
    assert error_of(raw) == message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    ],
)
def test_numbers_that_are_not_finite_are_refused(name, value):
    assert error_of({name: value}).startswith(f"{name} must be ")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_biases_that_are_not_finite_are_refused(value):
    assert "logit_bias must have finite values" in error_of({"logit_bias": {"3": value}})


def test_an_invalid_stop_regex_is_refused_with_the_reason():
    assert "stop_regex '(' is not a valid regular expression" in error_of({"stop_regex": ["("]})


@pytest.mark.parametrize(
    "name",
    ["json_schema", "regex", "ebnf", "structural_tag", "choice", "custom_params", "watermark"],
)
def test_a_knob_for_an_absent_feature_is_refused_unless_empty(name):
    assert error_of({name: "x"}) == f"{name} is not supported by this server yet."
    assert SamplingParams.parse({name: ""}) == SamplingParams()
    assert SamplingParams.parse({name: None}) == SamplingParams()


def test_empty_stop_strings_are_dropped():
    assert SamplingParams.parse({"stop": ""}).stop == ()
    assert SamplingParams.parse({"stop": ["", "a"]}).stop == ("a",)


def test_max_new_tokens_zero_is_legal():
    assert SamplingParams.parse({"max_new_tokens": 0}).max_new_tokens == 0


@pytest.mark.parametrize("token_id", [-1, 100, 200000000, 10**9])
def test_token_ids_outside_the_vocabulary_are_refused_by_name(token_id):
    bias = SamplingParams.parse({"logit_bias": {str(token_id): 5}})
    with pytest.raises(
        SamplingParamsError, match=rf"logit_bias must has keys in \[0, 99\], got {token_id}\."
    ):
        bias.check_vocab(100)
    stop = SamplingParams.parse({"stop_token_ids": [3, token_id], "min_new_tokens": 5})
    with pytest.raises(
        SamplingParamsError, match=rf"stop_token_ids must be in \[0, 99\], got {token_id}\."
    ):
        stop.check_vocab(100)


def test_token_ids_inside_the_vocabulary_pass():
    params = SamplingParams.parse({"logit_bias": {"0": 1, "99": 1}, "stop_token_ids": [0, 99]})
    params.check_vocab(100)
    assert params.logit_bias == {0: 1.0, 99: 1.0}


def test_an_error_does_not_echo_a_large_value():
    assert len(error_of({"temperature": "x" * 10**6})) < 1000
    assert len(error_of({"x" * 10**6: 1})) < 1000
    assert len(error_of({"logit_bias": {"x" * 10**6: 1}})) < 1000
    assert len(error_of({"logit_bias": {"9" * 10**6: 1}})) < 1000


def test_greedy_is_no_temperature_or_one_candidate():
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=9e-7).is_greedy
    assert SamplingParams(top_k=1).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy


@pytest.mark.parametrize("biases", [{"5": 1.0, "05": 2.0}, {5: 1.0, "5": 2.0}])
def test_a_token_with_two_biases_is_refused(biases):
    with pytest.raises(SamplingParamsError, match="logit_bias must name token 5 once"):
        SamplingParams.parse({"logit_bias": biases}, {})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (
            "stop_token_ids",
            list(range(1025)),
            "at most 1024 ids, got 1025.",
        ),
        ("logit_bias", {str(i): 1 for i in range(8193)}, "at most 8192 tokens, got 8193."),
        ("stop", ["x", "y" * 4097], "at most 4096 characters, got 4097."),
    ],
)
def test_a_long_list_is_refused_by_its_length(name, value, words):
    assert words in error_of({name: value})
