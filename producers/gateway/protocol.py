"""Decides what an agent may ask for, and in which words it is answered: the OpenAI protocol, as far as it is spoken.

How a train episode is sampled is the run's to say, so temperature, top-p and the like are recorded as asked and not
followed. What would change an answer's meaning if it were ignored (several choices, grammars, images) is an error in
the protocol's own form. A request's `key` tells a retry from another request: the same body is the same request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..conversation import Chat, Raw
from ..toolcalls import Answer

B = TypeVar("B", bound=BaseModel)

# What says how to sample: recorded with the turn.
ASKED = ("model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
         "repetition_penalty", "seed", "max_tokens", "max_completion_tokens", "stop", "tool_choice",
         "parallel_tool_calls", "reasoning_effort", "n", "best_of", "logit_bias", "response_format")  # fmt: skip


class Refused(Exception):
    """A request that gets no answer: an HTTP status, and the protocol's error object."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None,
                 retry_after_s: float | None = None) -> None:  # fmt: skip
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error")  # fmt: skip
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, understood. `max_tokens` None: as many as there are. `asked`: what it said of sampling."""

    kind: Literal["chat", "completion"]
    said: Chat | Raw
    stop: tuple[str, ...]
    max_tokens: int | None
    stream: bool
    stream_usage: bool
    logprobs: bool
    token_ids: bool
    asked: Mapping[str, Any]
    key: bytes

    @property
    def model(self) -> str:
        return str(self.asked.get("model", ""))

    @property
    def tools(self) -> bool:
        return isinstance(self.said, Chat) and bool(self.said.tools)


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")
    model: str = ""
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    return_token_ids: bool | None = False


class _Function(BaseModel):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(BaseModel):
    id: str = ""
    function: _Function


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Chat(_Body):
    messages: list[_Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class _Completion(_Body):
    prompt: str | list[int] | list[str]
    logprobs: int | None = None


def chat_request(body: Any) -> Asked:
    """Raises Refused."""
    _refuse_unsupported(body)
    found = _validated(_Chat, body)
    if found.tool_choice not in (None, "auto", "none"):
        raise Refused(400, "tool_choice must be 'auto' or 'none': forcing a call needs a grammar, which changes the "
                           "distribution that is trained", code="unsupported_parameter",
                      param="tool_choice")  # fmt: skip
    messages = tuple(_message(number, one) for number, one in enumerate(found.messages))
    tools = tuple(found.tools or ()) if found.tool_choice != "none" else ()
    said = Chat(messages, tools, found.chat_template_kwargs or {})
    return _asked("chat", said, body, found, found.max_completion_tokens or found.max_tokens, bool(found.logprobs))


def completion_request(body: Any) -> Asked:
    """Raises Refused."""
    _refuse_unsupported(body)
    found = _validated(_Completion, body)
    prompt = found.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        if len(prompt) > 1:
            raise Refused(400, "one prompt a request: send the others by themselves", code="unsupported_parameter",
                          param="prompt")  # fmt: skip
        prompt = prompt[0]
    if not prompt:
        raise Refused(400, "the prompt is empty", code="invalid_value", param="prompt")
    said = Raw(prompt if isinstance(prompt, str) else tuple(int(i) for i in prompt))
    return _asked("completion", said, body, found, found.max_tokens, found.logprobs is not None)


def _asked(kind: Literal["chat", "completion"], said: Chat | Raw, body: Mapping[str, Any], found: _Body,
           max_tokens: int | None, logprobs: bool) -> Asked:  # fmt: skip
    stop = (found.stop,) if isinstance(found.stop, str) else tuple(found.stop or ())
    # How the answer is sent is no part of what is asked: a retry may want it otherwise.
    plain = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
    key = hashlib.blake2b(json.dumps([kind, plain], sort_keys=True).encode(), digest_size=16).digest()
    return Asked(kind, said, tuple(s for s in stop if s), max_tokens, bool(found.stream),
                 bool((found.stream_options or {}).get("include_usage")), logprobs, bool(found.return_token_ids),
                 {name: body[name] for name in ASKED if body.get(name) is not None}, key)  # fmt: skip


def _validated(kind: type[B], body: Any) -> B:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][:3])
        raise Refused(400, f"{where or 'body'}: {first['msg']}", code="invalid_value", param=where or None) from error


def _refuse_unsupported(body: Any) -> None:
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object", code="invalid_json")
    for name in ("n", "best_of"):
        if body.get(name) not in (None, 1):
            raise Refused(400, f"{name} must be 1: each answer is one turn of the episode; sample again with another "
                               "`seed`", code="unsupported_parameter", param=name)  # fmt: skip
    for name in ("logit_bias", "functions", "function_call", "suffix", "echo", "top_logprobs", "audio", "prediction",
                 "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"):  # fmt: skip
        if body.get(name):
            raise Refused(400, f"{name} isn't supported here: leave it out", code="unsupported_parameter", param=name)
    form = body.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise Refused(400, "response_format must be text: a grammar changes the distribution that is trained",
                      code="unsupported_parameter", param="response_format")  # fmt: skip


def _message(number: int, one: _Message) -> dict[str, Any]:
    """What a template is shown, and nothing that differs between two ways to say the same."""
    content = one.content
    if isinstance(content, list):
        for part in content:
            if part.get("type") not in ("text", "input_text") or not isinstance(part.get("text"), str):
                raise Refused(400, f"messages.{number}: only text is understood here, not {part.get('type')!r}",
                              code="unsupported_content", param=f"messages.{number}.content")  # fmt: skip
        content = "".join(part["text"] for part in content)
    out: dict[str, Any] = {"role": "system" if one.role == "developer" else one.role, "content": content or ""}
    if one.tool_calls:
        out["tool_calls"] = [{"type": "function", "id": call.id,
                              "function": {"name": call.function.name, "arguments": _values(call.function.arguments)}}
                             for call in one.tool_calls]  # fmt: skip
    if one.role == "tool" and one.tool_call_id:
        out["tool_call_id"] = one.tool_call_id
    if one.name:
        out["name"] = one.name
    return out


def _values(arguments: str | dict[str, Any]) -> Any:
    """Templates write them as JSON themselves."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments or "{}")
        except ValueError:
            return arguments
    return arguments


# ------------------------------------------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class Told:
    """What every form of an answer says. `created`: seconds since 1970. `tokens`: ids [n] with their logprobs [n] and
    texts [n], sampled by versions up to `version`."""

    id: str
    created: int
    asked: Asked
    answer: Answer
    finish: str
    prompt_ids: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    texts: Sequence[str]
    version: int
    cached_tokens: int | None

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.answer.calls else self.finish

    def usage(self) -> dict[str, Any]:
        prompt, sampled = len(self.prompt_ids), len(self.tokens)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": sampled,
                                 "total_tokens": prompt + sampled}  # fmt: skip
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage

    def calls(self) -> list[dict[str, Any]]:
        return [{"id": f"call_{self.id}_{i}", "type": "function",
                 "function": {"name": name, "arguments": json.dumps(arguments)}}
                for i, (name, arguments) in enumerate(self.answer.calls)]  # fmt: skip

    def whole(self) -> dict[str, Any]:
        """The body of an answer that isn't streamed."""
        if self.asked.kind == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": self.answer.content}
            if self.answer.calls:
                message |= {"content": self.answer.content or None, "tool_calls": self.calls()}
            choice: dict[str, Any] = {"index": 0, "message": message}
        else:
            choice = {"index": 0, "text": self.answer.content}
        choice |= {"finish_reason": self.finish_reason, "logprobs": self._logprobs()}
        out = envelope(self.id, self.created, self.asked, f"v{self.version}", stream=False)
        out |= {"choices": [choice], "usage": self.usage()}
        if self.asked.token_ids:
            out["prompt_token_ids"] = list(self.prompt_ids)
            choice["token_ids"] = list(self.tokens)
        return out

    def _logprobs(self) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        if self.asked.kind == "completion":
            return {"tokens": list(self.texts), "token_logprobs": list(self.logprobs), "top_logprobs": None}
        return {"content": [{"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                            for text, logprob in zip(self.texts, self.logprobs, strict=True)]}  # fmt: skip


def envelope(name: str, created: int, asked: Asked, fingerprint: str, *, stream: bool) -> dict[str, Any]:
    """What every answer and every streamed chunk begins with."""
    kind = "chat.completion" if asked.kind == "chat" else "text_completion"
    return {"id": name, "object": f"{kind}.chunk" if stream and asked.kind == "chat" else kind, "created": created,
            "model": asked.model, "system_fingerprint": fingerprint}  # fmt: skip


def piece(asked: Asked, text: str, *, first: bool = False) -> dict[str, Any]:
    """A choice of a streamed chunk."""
    if asked.kind == "completion":
        return {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
    delta: dict[str, Any] = {"content": text}
    if first:
        delta["role"] = "assistant"
    return {"index": 0, "delta": delta, "finish_reason": None}


def last_piece(told: Told) -> dict[str, Any]:
    """The choice that ends a stream: calls, and why it ended."""
    if told.asked.kind == "completion":
        return {"index": 0, "text": "", "finish_reason": told.finish_reason, "logprobs": told._logprobs()}
    calls = [{"index": i} | call for i, call in enumerate(told.calls())]
    choice = {"index": 0, "delta": {"tool_calls": calls} if calls else {}, "finish_reason": told.finish_reason}
    if told.asked.logprobs:
        choice["logprobs"] = told._logprobs()
    return choice | ({"token_ids": list(told.tokens)} if told.asked.token_ids else {})
