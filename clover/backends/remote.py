"""Any server that speaks the OpenAI API: Clover's own, vLLM, SGLang, llama.cpp, OpenAI. No tensors.

What such a server may leave out (usage, thinking, a canvas) may be missing. Fields that OpenAI does
not know are sent only if the request asks for something else than the default.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from clover.backends.base import (
    CanvasShown,
    ChatEvent,
    ChatFinished,
    ChatFinishReason,
    ChatRequest,
    ContentDelta,
    Load,
    ThinkingDelta,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from clover.backends.reply import write_arguments
from clover.chat import Message, ToolCall
from clover.errors import (
    CapacityError,
    CloverError,
    EngineClosedError,
    GenerationError,
    PromptError,
    RemoteError,
    RequestError,
)

_FINISH_REASONS: Final[Mapping[str, ChatFinishReason]] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
}
_STANDARD_SAMPLING: Final = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty"),
    # Not in the API's reference, but under these names in vLLM, SGLang and llama.cpp too
    *("top_k", "min_p", "repetition_penalty"),
)
_CONNECT_SECONDS: Final = 10.0
_ANY_KEY: Final = "none"  # for servers that ask for none: the client insists on one

Chunks = openai.AsyncStream[ChatCompletionChunk] | openai.AsyncStream[Completion]


class RemoteBackend:
    """Answers with the model of another server.

    Limits and stop strings are the server's to keep; `ChatRequest.timeout` is kept here. The
    several draws of a seed are the texts of that seed and those after it, as the API has no word for
    them. `ChatFinished.stop` is None unless the server says which stop string it was, and a number of
    `Usage` that it does not say is 0.

    Args:
        url: Where it is; `/v1` is added to an address without a path.
        model: Which of its models; None: the only one that it has.
        api_key: What it wants to be shown; None: nothing.
        timeout: Seconds of silence after which an answer is given up.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        """Connects to nothing yet.

        Raises:
            RequestError: That is not the address of a server.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RequestError(
                f"expected a URL such as http://127.0.0.1:8000/v1, found {url!r}; begin it with "
                "http:// or https://"
            )
        self._url = url if parts.path.strip("/") else f"{url.rstrip('/')}/v1"
        self._model = model
        self._timeout = timeout
        self._is_clover = False
        self._streams: set[RemoteStream] = set()
        self._client = openai.AsyncOpenAI(
            base_url=self._url,
            api_key=api_key or _ANY_KEY,
            timeout=openai.Timeout(timeout, connect=_CONNECT_SECONDS),
            max_retries=0,  # a full server is for the caller to wait for
        )

    @property
    def model(self) -> str:
        """The name of the model."""
        assert self._model is not None, "known once the context is entered"
        return self._model

    @property
    def load(self) -> Load:
        """How many of our answers are under way; what waits at the server nobody says."""
        return Load(running=len(self._streams), waiting=0)

    async def __aenter__(self) -> Self:
        """Asks the server for its models.

        Raises:
            RemoteError: It cannot be reached, or does not take the key.
            RequestError: It has several models, and none was chosen.
        """
        try:
            models = await self._list_models()
        except BaseException:
            await self._client.close()
            raise
        self._is_clover = any(owner == "clover" for owner in models.values())
        if self._model is None:
            if len(models) != 1:
                names = ", ".join(models) or "none"
                await self._client.close()
                raise RequestError(
                    f"expected one model at {self._url}, found {names}; name the one to ask"
                )
            [self._model] = models
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for the answers under way, or fails them if an exception leaves the context."""
        streams = list(self._streams)
        if kind is not None:
            for stream in streams:
                stream.fail(EngineClosedError("expected a backend at work, found one that closes"))
        await asyncio.gather(*(stream.wait() for stream in streams))
        await self._client.close()

    async def chat(self, request: ChatRequest) -> RemoteStream:
        """Sends a request; returns the events of its answer once the server has accepted it.

        Raises:
            RequestError: The server does not have the model, or refuses the request.
            CapacityError: It has too many requests; try again later.
            RemoteError: It cannot be reached, does not take the key, or fails.
        """
        loop = asyncio.get_running_loop()
        deadline = None if request.timeout is None else loop.time() + request.timeout
        try:
            async with asyncio.timeout_at(deadline):
                chunks = await self._send(request)
        except openai.APIError as error:
            raise self._explain(error) from error
        except TimeoutError as error:
            raise RemoteError(
                f"expected an answer of {self._url} to begin within {request.timeout:g} seconds, "
                "found none; try again later"
            ) from error
        stream = RemoteStream(request, self._explain, on_end=self._streams.discard)
        self._streams.add(stream)
        await stream.start(chunks, deadline)
        return stream

    async def count_tokens(self, request: ChatRequest) -> int:
        """Returns how many tokens the prompt of a request has.

        The API does not count, it only tells what an answer has cost: this asks for one token.

        Raises:
            RemoteError: The server does not say it. Besides, as `chat`.
        """
        async for event in await self.chat(replace(request, max_tokens=1, wants_canvas=False)):
            if isinstance(event, ChatFinished) and event.usage.prompt_tokens:
                return event.usage.prompt_tokens
        raise RemoteError(f"expected usage.prompt_tokens of {self._url}, found none")

    async def _list_models(self) -> dict[str, str]:
        """Returns the models by name, each with its owner; none if the server keeps no list."""
        try:
            page = await self._client.models.list()
            return {model.id: getattr(model, "owned_by", "") for model in page.data}
        except openai.NotFoundError:
            return {}
        except openai.APIError as error:
            raise self._explain(error) from error
        except (AttributeError, TypeError) as error:  # JSON of another kind, or a page
            raise RemoteError(
                f"expected a list of models at {self._url}/models, found something else; is it the "
                "address of an OpenAI-compatible API?"
            ) from error

    async def _send(self, request: ChatRequest) -> Chunks:
        if request.top_logprobs is not None:
            raise RequestError(
                f"top_logprobs is {request.top_logprobs}, but log-probabilities are not read from "
                f"{self._url}; leave it out, or ask the server itself"
            )
        decoding = _write_decoding(request)
        if request.raw is not None:
            return await self._client.completions.create(
                model=self.model,
                prompt=request.raw,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=decoding | _given(max_tokens=request.max_tokens),
            )
        fields = decoding | _write_chat(request)
        if request.wants_canvas and self._is_clover:  # elsewhere there is none to be shown
            fields["stream_canvas"] = True
        messages: list[Any] = list(_write_messages(request.messages))
        return await self._client.chat.completions.create(
            model=self.model,
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=fields,
        )

    def _explain(self, error: openai.APIError) -> CloverError:
        """Returns what an error of the client means here."""
        said = error.body.get("message") if isinstance(error.body, dict) else None
        said = said or error.message
        match error:
            case openai.APITimeoutError():
                return RemoteError(
                    f"expected {self._url} to answer, found silence for {self._timeout:g} seconds; "
                    "try again later"
                )
            case openai.APIConnectionError():
                return RemoteError(
                    f"expected a server at {self._url}, found: {error.__cause__ or said}; start it "
                    "(for example with clover serve), or correct the URL"
                )
            case openai.AuthenticationError() | openai.PermissionDeniedError():
                return RemoteError(
                    f"expected an API key that {self._url} accepts, found another or none: {said}; "
                    "set --api-key or CLOVER_API_KEY"
                )
            case openai.NotFoundError():
                return RequestError(
                    f"expected a model and an address that {self._url} has, found "
                    f"{self._model!r}: {said}; correct the model's name or the URL"
                )
            case openai.RateLimitError():
                wait = error.response.headers.get("retry-after")
                when = f"in {wait} seconds" if wait else "later"
                return CapacityError(
                    f"expected room at {self._url}, found none: {said}; try again {when}"
                )
            case openai.APIStatusError() if error.status_code < 500:
                return RequestError(f"{self._url} refuses the request: {said}")
            case openai.APIStatusError():
                return RemoteError(
                    f"expected an answer of {self._url}, found status {error.status_code}: {said}; "
                    "try again later"
                )
            case _:
                return RemoteError(
                    f"expected the answer of {self._url} to go on, found an error: {said}"
                )


class RemoteStream:
    """The events of one answer: a `ChatStream`. A task of its own reads them."""

    def __init__(
        self,
        request: ChatRequest,
        explain: Callable[[openai.APIError], CloverError],
        *,
        on_end: Callable[[RemoteStream], None],
    ) -> None:
        """Waits for `start`.

        Args:
            request: What was asked.
            explain: Turns an error of the client into one of ours.
            on_end: Is called with the stream once nothing more will come.
        """
        self._request = request
        self._explain = explain
        self._on_end = on_end
        self._items: asyncio.Queue[ChatEvent | CloverError] = asyncio.Queue()
        self._is_over = False  # the last item has been given out
        self._thinking = ""
        self._content = ""
        self._calls: list[_Call] = []
        self._usage: Mapping[str, Any] = {}
        self._reason: str | None = None
        self._stop: str | None = None

    async def start(self, chunks: Chunks, deadline: float | None) -> None:
        """Reads `chunks`, until `deadline` on the loop's clock at the latest."""
        self._task = asyncio.create_task(self._read(chunks, deadline))
        await asyncio.sleep(0)  # one that has not begun could not be cancelled in good order

    def __aiter__(self) -> Self:
        """Returns the iterator."""
        return self

    async def __anext__(self) -> ChatEvent:
        """Returns the next event."""
        if self._is_over:
            raise StopAsyncIteration
        item = await self._items.get()
        self._is_over = isinstance(item, ChatFinished | CloverError)
        if isinstance(item, CloverError):
            raise item
        return item

    def cancel(self) -> None:
        """Closes the connection; of no effect on an answer that has ended."""
        self._task.cancel()

    def fail(self, error: CloverError) -> None:
        """Ends the answer with an error."""
        self._items.put_nowait(error)
        self.cancel()

    async def wait(self) -> None:
        """Returns once the connection is no longer needed."""
        await self._task

    async def _read(self, chunks: Chunks, deadline: float | None) -> None:
        try:
            async with asyncio.timeout_at(deadline), chunks:
                async for chunk in chunks:
                    for event in self._take(chunk.to_dict(warnings=False)):
                        self._items.put_nowait(event)
            self._finish(self._read_reason())
        except asyncio.CancelledError:
            self._finish("cancelled")
        except TimeoutError:
            self._finish("length")
        except openai.APIError as error:
            is_cut = isinstance(error, openai.APIConnectionError)
            is_silent = isinstance(error, openai.APITimeoutError)
            told = self._broken_off() if is_cut and not is_silent else self._explain(error)
            told.__cause__ = error
            self._items.put_nowait(told)
        except CloverError as error:
            self._items.put_nowait(error)
        except (
            Exception
        ) as error:  # a foreign server may send anything, and nobody may wait for ever
            unread = RemoteError(
                "expected chunks as in the OpenAI API, found what cannot be read: "
                f"{type(error).__name__}: {error}"
            )
            unread.__cause__ = error
            self._items.put_nowait(unread)
        finally:
            self._on_end(self)

    def _take(self, chunk: Mapping[str, Any]) -> Iterator[ChatEvent]:
        """Yields what a chunk adds. Tool calls are given out at the end, when they are whole."""
        self._usage = chunk.get("usage") or self._usage
        if canvas := chunk.get("canvas"):
            yield CanvasShown(
                cells=tuple(canvas["cells"]),
                confidences=tuple(canvas["confidences"]),
                start=canvas["start"],
                held=canvas["held"],
            )
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            # Servers have either name for it, ours both
            if thinking := delta.get("reasoning") or delta.get("reasoning_content"):
                self._thinking += thinking
                yield ThinkingDelta(thinking)
            if content := delta.get("content") or choice.get("text"):
                self._content += content
                yield ContentDelta(content)
            for part in delta.get("tool_calls") or ():
                self._take_call(part)
            self._reason = choice.get("finish_reason") or self._reason
            self._stop = choice.get("stop_reason") or self._stop

    def _take_call(self, part: Mapping[str, Any]) -> None:
        """Adds a piece of a call: to the last one of its index, or to a new one with a new id.

        Some servers give every call the same index, others repeat the id with every piece.
        """
        index, call_id = part.get("index"), part.get("id")
        known = [call for call in self._calls if call.index == index]
        if not known or (call_id and call_id != known[-1].id):
            known = [_Call(index=index, id=call_id)]
            self._calls += known
        function = part.get("function") or {}
        known[-1].name += function.get("name") or ""
        known[-1].arguments += function.get("arguments") or ""

    def _read_reason(self) -> ChatFinishReason:
        if self._reason is None:
            raise self._broken_off()
        if self._reason not in _FINISH_REASONS:
            raise GenerationError(
                f"expected one of {', '.join(_FINISH_REASONS)} as finish_reason, found "
                f"{self._reason!r}: the server does not give this answer"
            )
        reason = _FINISH_REASONS[self._reason]
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _broken_off(self) -> CloverError:
        return RemoteError(
            "expected a finish_reason at the end, found a stream that breaks off after "
            f"{len(self._thinking) + len(self._content)} characters; ask again"
        )

    def _finish(self, reason: ChatFinishReason) -> None:
        calls = tuple(self._read_calls(is_cut=reason in ("length", "cancelled")))
        for index, call in enumerate(calls):
            self._items.put_nowait(ToolCallStarted(index, call.name))
            self._items.put_nowait(ToolCallDelta(index, write_arguments(call)))
        message = Message("assistant", self._content, self._thinking or None, calls)
        end = ChatFinished(
            message=message,
            finish_reason=reason,
            stop=self._stop if self._stop in self._request.stop else None,
            usage=_read_usage(self._usage),
        )
        self._items.put_nowait(end)

    def _read_calls(self, *, is_cut: bool) -> Iterator[ToolCall]:
        """Yields the calls. Of an answer that was cut, the call at its end may be unfinished."""
        for call in self._calls:
            try:
                yield ToolCall.from_dict({"name": call.name, "arguments": call.arguments})
            except PromptError as error:
                if is_cut:
                    return
                raise GenerationError(
                    f"expected a tool call that can be read, found: {error}"
                ) from error


@dataclass(kw_only=True, slots=True)
class _Call:
    """A call as it comes in, piece by piece; `arguments` is JSON text."""

    index: int | None
    id: str | None
    name: str = ""
    arguments: str = ""


def _given(**fields: Any) -> dict[str, Any]:
    """Returns the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def _write_decoding(request: ChatRequest) -> dict[str, Any]:
    """Returns the fields that say how to decode."""
    sampling = request.sampling
    bias = sampling.logit_bias
    return _given(
        **{name: getattr(sampling, name) for name in _STANDARD_SAMPLING},
        logit_bias=None if bias is None else {str(key): value for key, value in bias.items()},
        seed=None if sampling.seed is None else sampling.seed + request.draw,
        stop=list(request.stop) or None,
        policy=request.policy,
        block_size=request.block_size,
    )


def _write_chat(request: ChatRequest) -> dict[str, Any]:
    """Returns the fields that only chats have."""
    fields = _given(
        max_completion_tokens=request.max_tokens,
        thinking_budget=request.thinking_budget,
        response_format=_write_format(request.json_schema),
    )
    if not request.enable_thinking:
        fields["chat_template_kwargs"] = {"enable_thinking": False}
    if request.tools:
        fields["tools"] = list(map(_write_tool, request.tools))
        choice = request.tool_choice
        if choice in ("none", "required"):
            fields["tool_choice"] = choice
        elif choice != "auto":
            fields["tool_choice"] = {"type": "function", "function": {"name": choice}}
        if not request.parallel_tool_calls:
            fields["parallel_tool_calls"] = False
    return fields


def _write_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool in the API's own form; a bare function is one, too."""
    return {"type": "function", "function": tool.get("function", tool)}


def _write_format(schema: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    if schema == {"type": "object"}:  # which `strict` would not let pass at OpenAI
        return {"type": "json_object"}
    named = {"name": "answer", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": named}


def _write_messages(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yields the turns. Results follow their calls in order, and get the ids that those had.

    Thinking goes back under the name that servers with thinking understand; a server without it has
    never sent any.
    """
    # Nine letters and digits are an id for the most particular server (Mistral's)
    ids = (f"call{number:05}" for number in itertools.count())
    awaited: list[str] = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            awaited = [next(ids) for _ in message.tool_calls]
            turn["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": write_arguments(call)},
                }
                for call_id, call in zip(awaited, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            if not awaited:
                raise PromptError(
                    "expected a tool result to follow its call, found one without a call"
                )
            turn["tool_call_id"] = awaited.pop(0)
        yield turn


def _read_usage(usage: Mapping[str, Any]) -> Usage:
    prompt = usage.get("prompt_tokens_details") or {}
    completion = usage.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=prompt.get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
        thinking_tokens=completion.get("reasoning_tokens") or 0,
        passes=usage.get("passes") or 0,
        previews=usage.get("previews") or 0,
    )
