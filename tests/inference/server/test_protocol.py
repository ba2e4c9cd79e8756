"""Bodies of requests: what is accepted, and the field that an error names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megafp8.data.tokenizers import build_tokenizer
from megafp8.inference.options import SamplingOptions
from megafp8.inference.server.engine import TokenUpdate
from megafp8.inference.server.protocol import ApiError, ChatBody, CompletionBody, Response, parse, token_text

MESSAGES = [{"role": "user", "content": "hi"}]
BYTES = build_tokenizer("bytes")


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"model": "m", "prompt": "a"} | fields).encode())


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"model": "m", "messages": MESSAGES} | fields).encode())


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", ["a"]), (["a", ""], ["a", ""]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_forms_of_a_prompt(given: Any, prompts: list[Any]) -> None:
    assert completion(prompt=given).prompt == prompts


def test_options_and_defaults() -> None:
    """Null is the default, and fields whose value changes nothing are accepted."""
    assert completion(stop=None, n=None).sampling(16, 3) == SamplingOptions(max_tokens=16, temperature=1.0, seed=3)
    neutral = {"echo": False, "best_of": 1, "presence_penalty": 0.0, "logit_bias": {}, "user": "me", "suffix": None}
    assert completion(**neutral) == completion()
    given = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_end": True, "stop": "x"}
    expected = SamplingOptions(
        max_tokens=9, temperature=0.0, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=1.1, stop=("x",), seed=4,
        num_samples=2, logprobs=5, ignore_end=True,
    )  # fmt: skip
    assert completion(**given, n=2, temperature=0, logprobs=5).sampling(9, 4) == expected
    assert completion().most_tokens == ("max_tokens", 16)
    assert chat().most_tokens == ("max_tokens", None)
    assert chat(max_completion_tokens=3).most_tokens == ("max_completion_tokens", 3)
    assert (chat().top, chat(logprobs=True).top, chat(logprobs=True, top_logprobs=4).top) == (None, 0, 4)
    neutral = {"response_format": {"type": "text"}, "tools": [], "store": False, "parallel_tool_calls": True}
    assert chat(**neutral) == chat()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ["a", [1]]}, "prompt", "prompt: must be a string, a list of strings, a list of tokens"),
        ({"prompt": [True]}, "prompt", "must be"),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": [[]]}, "prompt", "not empty"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"n": True}, "n", "valid integer"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": 1e-6}, "temperature", "temperature = 1e-06: must be 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ["a"] * 5}, "stop", "stop: must be a string or at most 4"),
        ({"stop": ""}, "stop", "1 to 256 characters"),
        ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"echo": True}, "echo", "echo is not supported; leave it out"),
        ({"best_of": 3}, "best_of", "best_of is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"max_token": 5}, "max_token", "Unrecognized request argument supplied: max_token"),
        ({"no_effect": 5}, "no_effect", "Unrecognized"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "stream_options.usage: Extra inputs"),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as error:
        completion(**fields)
    assert (error.value.status, error.value.content()["error"]["param"]) == (400, param)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages", "messages.0.content: Field required"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages.0.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages", "must be a string, or a list of parts"),
        ({"messages": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}, "messages", "parts of type text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc/passwd"}]}]},
         "messages", "parts of type text"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": []}]}, "messages", "Extra inputs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "Unrecognized"),
        ({"tools": [{}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs = true"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "give one"),
        ({"logprobs": 2}, "logprobs", "valid boolean"),
    ],
)  # fmt: skip
def test_errors_of_chats_name_the_field(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(**fields)
    assert (error.value.status, error.value.content()["error"]["param"]) == (400, param)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'"x"', b"\xff", b"[" * 10**5, b'{"model": NaN}', b'{"a": "\\ud800"}']
)
def test_what_is_no_json_object(raw: bytes) -> None:
    with pytest.raises(ApiError, match="the body is not"):
        parse(CompletionBody, raw)


def test_the_text_of_a_token_depends_on_the_one_before() -> None:
    words = {1: "▁a", 2: "▁b", 3: "\ufffd"}

    def decode(tokens: list[int]) -> str:
        return "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" ")

    assert [token_text(decode, before, token) for before, token in ((1, 2), (3, 2), (1, 3))] == [" b", "b", "\ufffd"]


def test_log_probabilities_have_the_form_of_the_endpoint() -> None:
    """A character of two tokens has no bytes; of tokens with one text the most probable counts; no infinity."""
    tops = [[(104, -0.5), (200, -2.0), (201, -float("inf"))], [(195, -1.0), (105, -1.5), (106, -2.0)]]
    updates = [
        TokenUpdate(0, 0, "h", token=104, logprob=-0.5, top_logprobs=tops[0], finish_reason=None),
        TokenUpdate(0, 0, "", token=195, logprob=-1.0, top_logprobs=tops[1], finish_reason="length"),
    ]
    response = Response(completion(logprobs=3), [[1]], BYTES.decode)
    for update in updates:
        response.add(update)
    assert response.finished
    (choice,) = response.whole()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["h", "\ufffd"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"h": -0.5, "\ufffd": -2.0}, {"\ufffd": -1.0, "i": -1.5, "j": -2.0}],
        "text_offset": [0, 1],
    }
    streamed = Response(chat(logprobs=True, top_logprobs=3, stream=True), [[1]], BYTES.decode)
    chunks = [streamed.chunk(update) for update in updates]
    contents = [chunk["choices"][0]["logprobs"]["content"][0] for chunk in chunks if chunk is not None]
    assert [(x["token"], x["bytes"], x["logprob"]) for x in contents] == [("h", [104], -0.5), ("\ufffd", None, -1.0)]
    assert [x["logprob"] for x in contents[0]["top_logprobs"]] == [-0.5, -2.0, -9999.0]
    assert streamed.last_chunk() is None
