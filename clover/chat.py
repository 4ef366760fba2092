"""Messages to text and back: the Qwen3.6 chat format.

`ChatTemplate` renders messages and tools into a prompt; `ChatParser` reads generated text, in
chunks of any size, back into thinking, content and tool calls. Knows text only: no token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, Self, cast, get_args
from urllib.parse import unquote

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from clover.errors import PromptError, TemplateError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: Final[tuple[str, ...]] = get_args(Role)

DEFAULT_TEMPLATE: Final = """\
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last_query = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\nYou can call these functions:\\n<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '</tools>\\nOne call, each tag on its own line: <tool_call><function=NAME>' }}
    {{- '<parameter=KEY>VALUE</parameter></function></tool_call>' }}
    {{- '\\n\\n' + system if system else '' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}
            {{- raise_exception('a system message must come first, found one at index '
                                ~ loop.index0) }}
        {%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query %}
            {{- '<think>\\n' + (message.reasoning_content or '') | trim + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if not loop.first else '\\n\\n' if content else '' }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user\\n' }}
        {%- else %}
            {{- '\\n' }}
        {%- endif %}
        {{- '<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {{- '' if enable_thinking else '\\n</think>\\n\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called. Arguments hold JSON values."""

    name: str
    arguments: Mapping[str, Any]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the call that an OpenAI-like dict describes; arguments as JSON text or mapping.

        Raises:
            PromptError: The name is missing or the arguments are not a JSON object.
        """
        function = data.get("function", data) if isinstance(data, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise PromptError(f"a tool call needs a function name, found {data!r}")
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments:
            try:
                arguments = json.loads(arguments, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                raise PromptError(
                    f"arguments of tool call {name!r} are not JSON: {error}"
                ) from None
        if arguments is None or arguments == "":
            arguments = {}
        if not isinstance(arguments, Mapping):
            raise PromptError(
                f"arguments of tool call {name!r} must be an object, found {arguments!r}"
            )
        return cls(name, dict(arguments))

    def to_dict(self) -> dict[str, Any]:
        """Returns the OpenAI-like dict; arguments stay a mapping, as chat templates expect."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat. Thinking and tool calls belong to the assistant only."""

    role: Role
    content: str = ""
    thinking: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise PromptError(f"role must be one of {', '.join(ROLES)}, found {self.role!r}")
        if not isinstance(self.content, str):
            raise PromptError(f"content must be text, found {self.content!r}")
        if not isinstance(self.thinking, str | None):
            raise PromptError(f"thinking must be text or None, found {self.thinking!r}")
        if self.role != "assistant" and (self.thinking is not None or self.tool_calls):
            raise PromptError(f"only an assistant thinks and calls tools, found role {self.role!r}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the message that an OpenAI-like dict describes.

        Thinking is read from `reasoning_content` or `thinking`. The ids of tool calls are dropped:
        the format has no place for them, results follow in the order of the calls.

        Raises:
            PromptError: A field is unknown or holds what the format cannot say.
        """
        if not isinstance(data, Mapping):
            raise PromptError(f"a message must be an object with a role, found {data!r}")
        known = {"role", "content", "reasoning_content", "thinking", "tool_calls"}
        unknown = {key for key, value in data.items() if value is not None} - known
        if unknown := unknown - {"id", "name", "tool_call_id"}:
            raise PromptError(f"unknown message fields {sorted(unknown)}; expected {sorted(known)}")
        thinking = data.get("reasoning_content")
        calls = data.get("tool_calls") or ()
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise PromptError(f"tool_calls must be a list of calls, found {calls!r}")
        return cls(
            role=cast(Role, data.get("role")),
            content=_join_parts(data.get("content")),
            thinking=data.get("thinking") if thinking is None else thinking,
            tool_calls=tuple(ToolCall.from_dict(call) for call in calls),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the OpenAI-like dict, thinking as `reasoning_content`."""
        data: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking is not None:
            data["reasoning_content"] = self.thinking
        if self.tool_calls:
            data["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        return data


def _join_parts(content: object) -> str:
    """Returns the text of a message's content: None, a string, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise PromptError(f"content must be text or a list of text parts, found {content!r}")


class ChatTemplate:
    """A jinja2 chat template in a sandbox, with the names that Hugging Face templates use.

    Special tokens written inside a message are rendered as they are, and the tokenizer will read
    them as special: who serves strangers must refuse or rewrite such text first.
    """

    def __init__(self, source: str = DEFAULT_TEMPLATE) -> None:
        """Compiles `source`.

        Raises:
            TemplateError: The source is not valid jinja2.
        """
        self.source = source
        self._template = _compile(source)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Returns the template of a checkpoint folder, or the built-in one if it has none.

        Raises:
            TemplateError: The folder's template is not valid jinja2, or its file is damaged.
        """
        path = folder / "chat_template.jinja"
        if path.is_file():
            try:
                return cls(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError as error:
                raise TemplateError(f"{path}: expected UTF-8 text, found: {error}") from error
        source = _read_template_field(folder / "tokenizer_config.json")
        return cls() if source is None else cls(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        enable_thinking: bool = True,
        add_generation_prompt: bool = True,
    ) -> str:
        """Returns the messages as one text, tools listed in the system turn.

        Raises:
            PromptError: There are no messages.
            TemplateError: The template failed, refused the messages, or tried to leave its sandbox.
        """
        if not messages:
            raise PromptError("expected at least one message, found none")
        try:
            return self._template.render(
                messages=[message.to_dict() for message in messages],
                tools=list(tools) or None,
                enable_thinking=enable_thinking,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(_describe(error)) from error
        except Exception as error:  # a template is a foreign program: it may raise anything
            raise TemplateError(f"chat template failed: {type(error).__name__}: {error}") from error


def _read_template_field(path: Path) -> str | None:
    """Returns the `chat_template` of a `tokenizer_config.json`, None if there is none."""
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{path} is not JSON: {error}") from error
    source = config.get("chat_template") if isinstance(config, dict) else config
    if source is None or isinstance(source, str):
        return source
    raise TemplateError(
        f"{path}: expected an object whose chat_template is one text, found "
        f"{type(source).__name__}; put the template to use into chat_template.jinja"
    )


def render_reply(message: Message, *, enable_thinking: bool) -> str:
    """Returns what the model has to write after the generation prompt, up to and with `<|im_end|>`.

    The built-in template rendered with the reply equals its generation prompt, this text and a
    newline; training data is made of these two.

    Raises:
        PromptError: The message is not an assistant's, or it thinks where thinking is off.
    """
    if message.role != "assistant":
        raise PromptError(f"a reply must come from the assistant, found role {message.role!r}")
    thinking = (message.thinking or "").strip()
    if thinking and not enable_thinking:
        raise PromptError("the reply holds thinking, but enable_thinking is false")
    opening = f"{thinking}\n</think>\n\n" if enable_thinking else ""
    content = message.content.strip()
    calls = "\n".join(_render_call(call) for call in message.tool_calls)
    gap = "\n\n" if content and calls else ""
    return f"{opening}{content}{gap}{calls}<|im_end|>"


def _render_call(call: ToolCall) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else _to_json(value)}\n</parameter>\n"
        for key, value in call.arguments.items()
    )
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


class _Sandbox(ImmutableSandboxedEnvironment):
    """Raises at forbidden attributes, where jinja2 would print nothing.

    It keeps a template from Python and from the machine's files. It does not meter time or memory:
    plain repetition is bounded, but loops inside loops and padding are not.
    """

    intercepted_binops = frozenset({"*", "**"})
    max_product = 1_000_000

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**" and max(abs(left), abs(right)) > 64:
            raise SecurityError(f"power {left!r} ** {right!r} is too large")
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if hasattr(items, "__len__") and len(items) * times > self.max_product:
                    raise SecurityError(f"repetition of {type(items).__name__} is too long")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    """Returns the compiled template; options as in Hugging Face's `apply_chat_template`."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        message = f"chat template is not valid jinja2, line {error.lineno}: {error.message}"
        raise TemplateError(message) from error
    except Exception as error:  # constants are evaluated here already
        raise TemplateError(f"chat template does not compile: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_plain,
    )


def _as_plain(value: object) -> object:
    """Returns the JSON form of what json does not know: read-only mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is not JSON")


class _RefusedError(jinja2.TemplateError):
    """What a template says by `raise_exception`."""


def _raise_exception(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _describe(error: jinja2.TemplateError) -> str:
    if isinstance(error, SecurityError):
        return f"chat template tried to leave its sandbox: {error.message}"
    if isinstance(error, _RefusedError):
        return f"chat template refused the messages: {error.message}"
    return f"chat template failed: {type(error).__name__}: {error.message}"


_THINK: Final = "<think>"
_END_THINK: Final = "</think>"
_CALL: Final = "<tool_call>"
_END_CALL: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_END_FUNCTION: Final = "</function>"
_PARAMETER: Final = "<parameter="
_END_PARAMETER: Final = "</parameter>"
_END_TURN: Final = "<|im_end|>"
_NAME_END: Final = re.compile(r"[<>\n]")
_MAX_NAME_LENGTH: Final = 256  # characters; a text without end is no name
_MAX_SCHEMA_DEPTH: Final = 16
_COMBINERS: Final = ("anyOf", "oneOf", "allOf")

DeltaKind = Literal["thinking", "content", "call_started", "argument", "call", "call_dropped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatDelta:
    """One step of a reply that is being read.

    thinking      `text` is appended to the thinking
    content       `text` is appended to the content
    call_started  a call of function `text` has begun
    argument      `text` is appended to the raw value of `parameter` of the open call
    call          the open call is complete: `call`
    call_dropped  the open call was malformed; its text follows as content

    `span` says of thinking and content where `text` stands in the text that was read: its first
    character and the one behind its last.
    """

    kind: DeltaKind
    text: str = ""
    parameter: str = ""
    call: ToolCall | None = None
    span: tuple[int, int] | None = None


def parse_reply(
    text: str, *, starts_in_thinking: bool, tools: Sequence[Mapping[str, Any]] = ()
) -> Message:
    """Returns the assistant message that a whole generated text means; see `ChatParser`."""
    parser = ChatParser(starts_in_thinking=starts_in_thinking, tools=tools)
    parser.push(text)
    parser.finish()
    return parser.message


class ChatParser:
    """Reads generated text into thinking, content and tool calls; no chunking changes the result.

    What it decides, and never raises about:

    - Newlines around thinking and around content belong to the format and are dropped; text that
      follows a call is joined to earlier content by one newline.
    - A `<think>` that opens the reply begins thinking; elsewhere in the content it is plain text.
      Thinking ends at the first `</think>` only: a call inside thinking stays thinking.
    - One newline after `<parameter=KEY>` and one before `</parameter>` belong to the format. A
      value ends at the first `</parameter>`, and may hold anything else, other tags too.
    - Values are read by the schema of the tool: raw where it says string, otherwise JSON, and raw
      where that is not JSON. Without a schema: JSON if it is JSON.
    - A call of a function that was not offered is still a call: its caller answers with an error.
    - A malformed call (unfinished, a parameter given twice, text between its tags, a name of more
      than 256 characters) becomes content as it stands.
    - `<|im_end|>` ends the reply anywhere; text after it is ignored.
    """

    def __init__(
        self, *, starts_in_thinking: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Starts a reply to a prompt that offered `tools`.

        Raises:
            PromptError: A tool has no name, or its parameters are not a JSON schema.
        """
        self._schemas = read_tool_schemas(tools)
        self._starts_in_thinking = starts_in_thinking
        self._thinking = _Text()
        self._content = _Text()
        self._calls: list[ToolCall] = []
        self._open = _OpenCall()
        self._buffer = ""
        self._at = 0  # the buffer before this index is read; cutting it off each time would be slow
        self._num_cut = 0  # characters that have been cut off
        self._call_end = 0  # where, in all that was read, the last call ended
        self._deltas: list[ChatDelta] = []
        self._is_final = False
        self._step = self._read_start

    def push(self, text: str) -> list[ChatDelta]:
        """Returns what became certain with the next chunk of text."""
        self._buffer = self._buffer[self._at :] + text
        self._num_cut += self._at
        self._at = 0
        while self._step():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[ChatDelta]:
        """Returns what was held back, once no more text can come."""
        self._is_final = True
        deltas = self.push("")
        self._step = self._read_nothing
        return deltas

    @property
    def message(self) -> Message:
        """The assistant message so far: all that was certain."""
        return Message(
            role="assistant",
            content=self._content.value,
            thinking=self._thinking.value or None,
            tool_calls=tuple(self._calls),
        )

    @property
    def held(self) -> str:
        """The text that is read and not yet part of the message: a call, or a tag, that has begun."""
        return "".join(self._open.raw) + self._buffer[self._at :]

    # Each _read_* method is a state: it consumes from the buffer and returns whether to go on at
    # once; False means that more text is needed.

    def _read_start(self) -> bool:
        self._skip("\n")
        is_open = self._buffer.startswith(_THINK, self._at)
        if not is_open and self._may_begin(_THINK):
            return False
        if is_open:
            self._take(len(_THINK))
        is_thinking = is_open or self._starts_in_thinking
        self._step = self._read_thinking if is_thinking else self._read_content
        return True

    def _read_thinking(self) -> bool:
        text, tag = self._take_until(_END_THINK, _END_TURN)
        self._emit_text("thinking", text, tag)
        if tag is None:
            return False
        self._step = self._read_content if tag == _END_THINK else self._read_nothing
        return True

    def _read_content(self) -> bool:
        text, tag = self._take_until(_CALL, _END_TURN)
        self._emit_text("content", text, tag)
        if tag is None:
            return False
        self._open = _OpenCall(raw=[_CALL])
        self._step = self._read_function if tag == _CALL else self._read_nothing
        return True

    def _read_function(self) -> bool:
        return self._expect({_FUNCTION: self._read_function_name})

    def _read_function_name(self) -> bool:
        name = self._take_name()
        if name:
            self._open.name = name
            self._deltas.append(ChatDelta(kind="call_started", text=name))
            self._step = self._read_body
        return name is not None

    def _read_body(self) -> bool:
        return self._expect({_PARAMETER: self._read_key, _END_FUNCTION: self._read_end})

    def _read_key(self) -> bool:
        key = self._take_name()
        if key in self._open.values:
            return self._drop_call()
        if key:
            self._open.key = key
            self._open.values[key] = []
            self._step = self._read_newline
        return key is not None

    def _read_newline(self) -> bool:
        if self._at == len(self._buffer) and not self._is_final:
            return False
        if self._buffer.startswith("\n", self._at):
            self._open.raw.append(self._take(1))
        self._step = self._read_value
        return True

    def _read_value(self) -> bool:
        text, tag = self._take_until("\n" + _END_PARAMETER, _END_PARAMETER, _END_TURN)
        if text:
            key = self._open.key
            self._open.raw.append(text)
            self._open.values[key].append(text)
            self._deltas.append(ChatDelta(kind="argument", text=text, parameter=key))
        if tag is None:
            return self._is_final and self._drop_call()
        if tag == _END_TURN:
            self._at -= len(_END_TURN)
            return self._drop_call()
        self._open.raw.append(tag)
        self._step = self._read_body
        return True

    def _read_end(self) -> bool:
        return self._expect({_END_CALL: self._complete_call})

    def _complete_call(self) -> bool:
        schema = self._schemas.get(self._open.name, {})
        values = {key: "".join(parts) for key, parts in self._open.values.items()}
        arguments = {key: _convert(raw, key, schema) for key, raw in values.items()}
        call = ToolCall(self._open.name, arguments)
        self._calls.append(call)
        self._deltas.append(ChatDelta(kind="call", call=call))
        self._content.start_paragraph()
        self._call_end = self._num_cut + self._at
        self._open = _OpenCall()
        self._step = self._read_content
        return True

    def _read_nothing(self) -> bool:
        self._at = len(self._buffer)
        return False

    def _drop_call(self) -> bool:
        """Turns the open call's text so far into content; reading goes on behind it."""
        if self._open.name:
            self._deltas.append(ChatDelta(kind="call_dropped"))
        self._emit_text("content", "".join(self._open.raw))
        self._open = _OpenCall()
        self._step = self._read_content
        return True

    def _expect(self, states: Mapping[str, Callable[[], bool]]) -> bool:
        """Takes the tag that has to come next in a call, and enters its state."""
        self._open.raw.append(self._skip(" \t\r\n"))
        for tag, state in states.items():
            if self._buffer.startswith(tag, self._at):
                self._open.raw.append(self._take(len(tag)))
                self._step = state
                return True
        return not self._may_begin(*states) and self._drop_call()

    def _may_begin(self, *tags: str) -> bool:
        """Returns whether more text could complete one of the tags here."""
        rest = self._buffer[self._at : self._at + max(map(len, tags))]
        return not self._is_final and any(tag.startswith(rest) for tag in tags)

    def _take_name(self) -> str | None:
        """Returns a name and takes its `>`; None while undecided, "" after dropping the call."""
        end = _NAME_END.search(self._buffer, self._at, self._at + _MAX_NAME_LENGTH + 1)
        is_short = len(self._buffer) - self._at <= _MAX_NAME_LENGTH
        if end is None and is_short and not self._is_final:
            return None
        if end is None or end[0] != ">" or end.start() == self._at:
            self._drop_call()
            return ""
        name = self._take(end.start() - self._at)
        self._open.raw += [name, self._take(1)]
        return name

    def _skip(self, characters: str) -> str:
        """Takes and returns the given characters as far as they go."""
        at = self._at
        while at < len(self._buffer) and self._buffer[at] in characters:
            at += 1
        return self._take(at - self._at)

    def _take(self, size: int) -> str:
        start, self._at = self._at, self._at + size
        return self._buffer[start : self._at]

    def _take_until(self, *tags: str) -> tuple[str, str | None]:
        """Returns the text before the first tag, and the tag; both are taken.

        Without a tag: all text but an end that may become one, and None.
        """
        found = _any_of(tags).search(self._buffer, self._at)
        if found is None:
            held = 0 if self._is_final else _held_back(self._buffer, self._at, tags)
            return self._take(len(self._buffer) - held - self._at), None
        text = self._take(found.start() - self._at)
        return text, self._take(len(found[0]))

    def _emit_text(
        self, kind: Literal["thinking", "content"], text: str, tag: str | None = None
    ) -> None:
        """Adds text that has just been taken, and the tag behind it."""
        target = self._thinking if kind == "thinking" else self._content
        if added := target.add(text):
            num_held_back = len(text) - len(text.rstrip("\n"))
            end = self._num_cut + self._at - len(tag or "") - num_held_back
            start = max(end - len(added), self._call_end)  # behind a call a newline may be ours
            self._deltas.append(ChatDelta(kind=kind, text=added, span=(start, end)))


@dataclass(slots=True)
class _OpenCall:
    """A call that is being read: its text as it came, and its values so far."""

    raw: list[str] = field(default_factory=list)
    name: str = ""
    key: str = ""
    values: dict[str, list[str]] = field(default_factory=dict)


class _Text:
    """Grows by pieces; newlines at its two ends are held back."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._num_newlines = 0  # held back at the end
        self._is_at_start = True

    @property
    def value(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> str:
        """Returns what the text grew by."""
        if self._is_at_start:
            text = text.lstrip("\n")
            self._is_at_start = not text
        body = text.rstrip("\n")
        added = "\n" * self._num_newlines + body if body else ""
        self._num_newlines = len(text) - len(body) + (0 if body else self._num_newlines)
        if added:
            self._parts.append(added)
        return added

    def start_paragraph(self) -> None:
        """Replaces the newlines that stand, and those that come next, by a single one."""
        self._num_newlines = 1 if self._parts else 0
        self._is_at_start = True


@cache
def _any_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Returns the pattern that finds the first of the tags; of two at one place, the earlier."""
    return re.compile("|".join(map(re.escape, tags)))


def _held_back(text: str, start: int, tags: Sequence[str]) -> int:
    """Returns the length of the longest end of `text[start:]` that begins one of the tags."""
    longest = min(len(text) - start, max(map(len, tags)) - 1)
    for size in range(longest, 0, -1):
        if any(tag.startswith(text[-size:]) for tag in tags):
            return size
    return 0


def read_tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Returns the JSON schema of the parameters of each tool, by function name.

    Raises:
        PromptError: A tool has no name or another one's, or its parameters are not a JSON schema.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise PromptError(f"a tool needs a function with a name, found {tool!r}")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            raise PromptError(
                f"parameters of tool {name!r} must be an object, found {parameters!r}"
            )
        if name in schemas:
            raise PromptError(
                f"expected tools of different names, found {name!r} twice; rename one"
            )
        schemas[name] = parameters
    return schemas


def _convert(raw: str, key: str, parameters: Mapping[str, Any]) -> Any:
    """Returns the JSON value that the text of an argument means under the tool's schema."""
    properties = parameters.get("properties")
    schema = parameters.get("additionalProperties")
    if isinstance(properties, Mapping):
        schema = properties.get(key, schema)
    types, choices = value_types(schema, parameters)
    if raw in choices or types == {"string"}:
        return raw
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
        # Infinite numbers (1e999) and lone surrogates pass the reader, and no one can write them.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return raw
    if "string" in types and (isinstance(value, str) or not json_type_names(value) & types):
        return raw
    return value


_Allowed = tuple[frozenset[str], frozenset[str]]


def value_types(schema: object, root: Mapping[str, Any]) -> _Allowed:
    """Returns the JSON types that a parameter allows (none: anything) and its string choices.

    They decide how `ChatParser` reads a value: raw where only strings are allowed or where it is
    one of the choices, otherwise as JSON of one of the types if it is that.

    Args:
        schema: The parameter's.
        root: The schema that `schema` is a part of, in which its references lead.
    """
    return _allowed(schema, root, {})


def is_tag_name(name: str) -> bool:
    """Returns whether a function's or a parameter's name can stand in its tag."""
    return 0 < len(name) <= _MAX_NAME_LENGTH and not _NAME_END.search(name)


def _allowed(
    schema: object, root: Mapping[str, Any], known: dict[str, _Allowed], depth: int = 0
) -> _Allowed:
    """Returns the JSON types that a schema allows (none named: anything) and its string choices.

    `known` holds what each reference means, so that none is followed twice: they may form a cycle.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
        return frozenset(), frozenset()
    if "$ref" in schema:
        reference = str(schema["$ref"])
        if reference not in known:
            known[reference] = frozenset(), frozenset()
            known[reference] = _allowed(resolve_reference(reference, root), root, known, depth + 1)
        parts = [known[reference]]
    else:
        below = next(filter(None, (_as_list(schema.get(key)) for key in _COMBINERS)), [])
        parts = [_allowed(part, root, known, depth + 1) for part in below]
    choices = _as_list(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    declared = schema.get("type")
    declared = [declared] if isinstance(declared, str) else _as_list(declared)
    types = frozenset(name for name in declared if isinstance(name, str))
    if not types and choices:
        types = frozenset().union(*map(json_type_names, choices))
    if not types and all(names for names, _ in parts):
        types = frozenset().union(*(names for names, _ in parts))
    if types and schema.get("nullable") is True:
        types |= {"null"}
    strings = frozenset(choice for choice in choices if isinstance(choice, str))
    return types, strings.union(*(texts for _, texts in parts))


def _as_list(value: object) -> list[Any]:
    """Returns a JSON list as it is; anything else, which no schema means, as an empty one."""
    return list(value) if isinstance(value, list | tuple) else []


def resolve_reference(reference: str, root: Mapping[str, Any]) -> object:
    """Returns the part of the schema that a local reference (`#`, `#/$defs/Name`) names, or None."""
    node: object = root
    for name in unquote(reference).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list | tuple):
            is_index = name.isdecimal() and len(name) < 9 and int(name) < len(node)
            node = node[int(name)] if is_index else None
        else:
            node = node.get(name) if isinstance(node, Mapping) else None
    return node


def json_type_names(value: object) -> frozenset[str]:
    """Returns the JSON schema types of a JSON value."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, float) and not value.is_integer():
        return frozenset({"number"})
    if isinstance(value, int | float):
        return frozenset({"integer", "number"})
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return frozenset({names[type(value)]})


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
