"""Bodies of requests and responses, as in OpenAI's API reference.

An unknown field is an error, as in OpenAI's server, because a misspelled option would silently change the texts. A
field that OpenAI's server knows and this server does not support is also an error, unless its value has no effect.
Requests have the additional fields `top_k`, `min_p`, `repetition_penalty` and `ignore_end`, with the meaning of
`SamplingOptions`. Responses and chunks have the additional field `weight_versions`: the versions of the weights that
computed their tokens, as in `Completion`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

import pydantic_core
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megafp8.inference.options import SamplingOptions
from megafp8.inference.server.engine import TokenUpdate

MAX_STOPS, MAX_STOP_LENGTH = 4, 256
COMPLETION_TOKENS = 16
"""Default of max_tokens in /v1/completions."""
_LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI returns this number
_INCOMPLETE = "\ufffd"


class ApiError(Exception):
    """Error response. `param` is the field of the request that is wrong; `retry` asks the client to try again."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {"retry-after": "1"} if retry else {}

    def content(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


# --- requests --------------------------------------------------------------------------------------------------------


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _prompts(value: Any) -> Any:
    """Return a list of texts, or of lists of tokens, from any of the four forms of a prompt."""
    several = [value] if isinstance(value, str) or _is_tokens(value) else value
    if isinstance(several, list) and several:
        for kind in (lambda x: isinstance(x, str), _is_tokens):
            if all(map(kind, several)):
                return several
    raise ValueError("must be a string, a list of strings, a list of tokens, or a list of lists of tokens; not empty")


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    texts = isinstance(stops, list) and all(isinstance(x, str) and 0 < len(x) <= MAX_STOP_LENGTH for x in stops)
    if not texts or len(stops) > MAX_STOPS:
        raise ValueError(
            f"must be a string or at most {MAX_STOPS} strings, each with 1 to {MAX_STOP_LENGTH} characters"
        )
    return stops


def _content(value: Any) -> Any:
    """Return the text of a message, which is a string or a list of parts of type text."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if isinstance(parts, list) and parts:
        texts = [x["text"] for x in parts if isinstance(x, dict) and set(x) == {"type", "text"} and x["type"] == "text"]
        if len(texts) == len(parts) and all(isinstance(x, str) for x in texts):
            return "".join(texts)
    raise ValueError("must be a string, or a list of parts of type text; other types are not supported")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Message(_Strict):
    """Message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]
    name: str | None = None


class _Body(_Strict):
    """Fields of the requests of both endpoints."""

    model: str
    n: Annotated[int, Field(ge=1)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = []
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    ignore_end: bool = False

    no_effect: ClassVar[Mapping[str, Callable[[Any], bool]]]
    """Unsupported fields, each with a function that returns whether a value has no effect."""

    def sampling(self, max_tokens: int, seed: int) -> SamplingOptions:
        """Return the sampling options of the request. Raises ValueError for a value out of range."""
        return SamplingOptions(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=tuple(self.stop),
            seed=seed,
            num_samples=self.n,
            logprobs=self.top or 0,
            ignore_end=self.ignore_end,
        )

    @property
    def top(self) -> int | None:
        """Number of most probable tokens requested for each token; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """Name of the field that limits the length of a text, and its value."""
        raise NotImplementedError


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda given: given in values


_ANY = {key: lambda given: True for key in ("user", "metadata", "safety_identifier", "prompt_cache_key")}
_PENALTIES = {key: _is(0) for key in ("presence_penalty", "frequency_penalty")}


class CompletionBody(_Body):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=1)] = COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    no_effect = _ANY | _PENALTIES | {"echo": _is(False), "best_of": _is(1), "suffix": _is(""), "logit_bias": _is({})}

    @property
    def top(self) -> int | None:
        """Number of most probable tokens requested for each token, from `logprobs`."""
        return self.logprobs

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """Name and value of `max_tokens`."""
        return "max_tokens", self.max_tokens


class ChatBody(_Body):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0

    no_effect = _ANY | _PENALTIES | {
        "logit_bias": _is({}),
        "response_format": _is({"type": "text"}),
        "modalities": _is(["text"]),
        "store": _is(False),
        "service_tier": _is("auto", "default"),
        "tools": _is([]),
        "tool_choice": _is("none"),
        "functions": _is([]),
        "function_call": _is("none"),
        "parallel_tool_calls": lambda given: True,
        **dict.fromkeys(("audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"), _is()),
    }  # fmt: skip

    @property
    def top(self) -> int | None:
        """Number of most probable tokens requested for each token, from `logprobs` and `top_logprobs`."""
        return self.top_logprobs if self.logprobs else None

    @property
    def most_tokens(self) -> tuple[str, int | None]:
        """Name and value of `max_completion_tokens`, or else of `max_tokens`."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens


class PauseBody(_Strict):
    """Body of POST /v1/weights/pause.

    `running` says whether running texts finish before the pause, or are held and continue after it with the weights
    that are in use then.
    """

    running: Literal["finish", "hold"] = "finish"


class RefitBody(_Strict):
    """Body of POST /v1/weights/refit: a checkpoint, or the address of a trainer that sends (`send_weights`)."""

    checkpoint: Annotated[str, Field(min_length=1)] | None = None
    trainer: Annotated[str, Field(min_length=1)] | None = None
    version: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class ResumeBody(_Strict):
    """Body of POST /v1/weights/resume, without fields."""


AnyBody: TypeAlias = CompletionBody | ChatBody
Body = TypeVar("Body", bound=_Body)


def _object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ApiError."""
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body is not a JSON object")
    return value


def _invalid(error: ValidationError) -> ApiError:
    """Return the error response for the first fault of a body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path, wrong = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{path}: {wrong}", param=path.partition(".")[0], code="invalid_value")


Control = TypeVar("Control", PauseBody, RefitBody, ResumeBody)


def parse_control(kind: type[Control], raw: bytes) -> Control:
    """Parse the body of a request about weights. An empty body has no fields. Raises ApiError."""
    try:
        body = kind.model_validate(_object(raw or b"{}"))
    except ValidationError as error:
        raise _invalid(error) from None
    if isinstance(body, RefitBody) and (body.checkpoint is None) == (body.trainer is None):
        raise ApiError(400, "give either checkpoint or trainer", param="checkpoint", code="invalid_value")
    return body


def parse(kind: type[Body], raw: bytes) -> Body:
    """Parse the body of a request. A field that is null gets its default. Raises ApiError."""
    requested = _object(raw)
    fields: dict[str, Any] = {}
    for name, value in requested.items():
        if value is None:
            continue
        if name in kind.no_effect:
            if not kind.no_effect[name](value):
                raise ApiError(400, f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
        elif name not in kind.model_fields:
            message = f"Unrecognized request argument supplied: {name[:100]}"
            raise ApiError(400, message, param=name[:100], code="unknown_parameter")
        else:
            fields[name] = value
    try:
        body = kind.model_validate(fields)
        body.sampling(1, 0)
    except ValidationError as error:
        raise _invalid(error) from None
    except ValueError as error:  # the message begins with the option's name
        raise ApiError(400, str(error), param=str(error).partition(" ")[0], code="invalid_value") from None
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream = true", param="stream_options")
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs = true", param="top_logprobs")
        if None not in (body.max_tokens, body.max_completion_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens mean the same; give one", param="max_tokens")
    return body


# --- responses -------------------------------------------------------------------------------------------------------


def to_json(content: Any) -> bytes:
    """Return `content` as compact JSON in UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def token_text(decode: Callable[[list[int]], str], before: int, token: int) -> str:
    """Return the text of a token that follows the token `before`.

    A token is not decoded alone, because some decoders drop a space at the beginning of a text.
    """
    context = decode([before])
    both = decode([before, token])
    return both[len(context) :] if _INCOMPLETE not in context and both.startswith(context) else decode([token])


@dataclass
class _Choice:
    """State of one text of a response.

    Attributes:
        before: Last token, at first of the prompt.
        text: Text so far.
        begun: Whether a chunk has been sent.
        finish_reason: Reason that the text has ended, or None.
        logprobs: Entries of the tokens so far.
        offset: Number of characters of all tokens so far.
    """

    before: int
    text: str = ""
    begun: bool = False
    finish_reason: str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    offset: int = 0


class Response:
    """Response to one request, built from token updates, either chunk by chunk or as a whole.

    Args:
        body: Body of the request.
        prompts: Token ids of the prompts.
        decode: Function that returns the text of token ids.
    """

    def __init__(
        self,
        body: AnyBody,
        prompts: Sequence[Sequence[int]],
        decode: Callable[[list[int]], str],
    ) -> None:
        self._body, self._decode, self._chat = body, decode, isinstance(body, ChatBody)
        self._about = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }
        self.prompt_tokens = sum(map(len, prompts))
        self.completion_tokens = 0
        self._weight_versions = set[int]()
        self._choices = [_Choice(prompt[-1]) for prompt in prompts for _ in range(body.n)]

    @property
    def finished(self) -> bool:
        """Whether all texts have ended."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens so far, including tokens that end texts."""
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return counts | {"total_tokens": sum(counts.values())}

    def chunk(self, update: TokenUpdate) -> dict[str, Any] | None:
        """Return the chunk of a stream for an update, or None if the update adds nothing to the response."""
        index, choice, entry = self._take(update)
        if not (update.text or entry or choice.finish_reason):
            return None
        logprobs = None if entry is None else self._logprobs([entry])
        choice_json: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if self._chat:
            choice_json["delta"] = ({} if choice.begun else {"role": "assistant"}) | {"content": update.text}
        else:
            choice_json["text"] = update.text
        choice.begun = True
        versions = {"weight_versions": [update.weight_version]}
        return self._chunk([choice_json]) | versions | ({"usage": None} if self._includes_usage else {})

    def last_chunk(self) -> dict[str, Any] | None:
        """Return the last chunk of a stream, with the usage, or None if the client did not request it."""
        return self._chunk([]) | {"usage": self.usage()} if self._includes_usage else None

    def add(self, update: TokenUpdate) -> None:
        """Add an update to the whole response."""
        _, choice, entry = self._take(update)
        choice.text += update.text
        if entry is not None:
            choice.logprobs.append(entry)

    def whole(self) -> dict[str, Any]:
        """Return the whole response, after all updates were added."""
        choices = []
        for index, choice in enumerate(self._choices):
            logprobs = None if self._body.top is None else self._logprobs(choice.logprobs)
            choice_json: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": choice.finish_reason}
            text = {"message": {"role": "assistant", "content": choice.text}} if self._chat else {"text": choice.text}
            choices.append(choice_json | text)
        versions = sorted(self._weight_versions)
        return self._about | {"choices": choices, "usage": self.usage(), "weight_versions": versions}

    @property
    def _includes_usage(self) -> bool:
        return self._body.stream_options is not None and self._body.stream_options.include_usage

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = {"object": "chat.completion.chunk"} if self._chat else {}
        return self._about | kind | {"choices": choices}

    def _take(self, update: TokenUpdate) -> tuple[int, _Choice, dict[str, Any] | None]:
        """Record an update. Return the index of its choice, the choice, and the token's entry in logprobs, or None."""
        index = update.prompt * self._body.n + update.sample
        choice = self._choices[index]
        if update.finish_reason is not None:
            choice.finish_reason = "length" if update.finish_reason == "length" else "stop"
        self.completion_tokens += 1
        self._weight_versions.add(update.weight_version)
        if self._body.top is None:
            return index, choice, None
        top = [self._entry(choice.before, *pair) for pair in update.top_logprobs]
        entry = self._entry(choice.before, update.token, update.logprob) | {"top_logprobs": top}
        entry["offset"] = choice.offset
        choice.offset += len(entry["token"])
        choice.before = update.token
        return index, choice, entry

    def _entry(self, before: int, token: int, logprob: float) -> dict[str, Any]:
        text = token_text(self._decode, before, token)
        known = None if _INCOMPLETE in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": known}

    def _logprobs(self, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return log-probabilities in the format of the endpoint."""
        if self._chat:
            return {"content": [{key: x for key, x in entry.items() if key != "offset"} for entry in entries]}
        tops: list[dict[str, float]] = [{} for _ in entries]
        for top, entry in zip(tops, entries, strict=True):
            for x in (*entry["top_logprobs"], entry):
                top.setdefault(x["token"], x["logprob"])  # keeps the most probable token of those with the same text
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": tops if self._body.top else None,
            "text_offset": [entry["offset"] for entry in entries],
        }
