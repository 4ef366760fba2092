from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clover.chat import (
    DEFAULT_TEMPLATE,
    ChatDelta,
    ChatParser,
    ChatTemplate,
    Message,
    ToolCall,
    parse_reply,
    render_reply,
)
from clover.errors import PromptError, TemplateError

TEMPLATE = ChatTemplate()


def make_tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = make_tool("weather", city={"type": "string"}, days={"type": "integer"})
CALL = ToolCall("weather", {"city": "Oslo", "days": 2})
CALL_TEXT = """\
<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>"""


# Messages


def test_a_message_survives_its_dict() -> None:
    message = Message("assistant", "So:", thinking="Hm.", tool_calls=(CALL,))
    assert Message.from_dict(message.to_dict()) == message
    assert Message.from_dict(Message("tool", "5").to_dict()) == Message("tool", "5")


def test_an_openai_message_is_read() -> None:
    message = Message.from_dict(
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'},
                }
            ],
        }
    )
    assert message == Message("assistant", tool_calls=(CALL,))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert Message.from_dict({"role": "user", "content": parts}) == Message("user", "ab")
    result = {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
    assert Message.from_dict(result) == Message("tool", "rain")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({"role": "robot", "content": ""}, "found 'robot'"),
        ({"content": ""}, "found None"),
        ({"role": "user", "content": 5}, "found 5"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image_url"),
        ({"role": "user", "content": "", "audio": {}}, r"unknown message fields \['audio'\]"),
        ({"role": "user", "content": "", "thinking": "x"}, "only an assistant thinks"),
        ({"role": "tool", "tool_calls": [{"name": "f"}]}, "only an assistant thinks and calls"),
        ({"role": "assistant", "reasoning_content": 5}, "thinking must be text or None, found 5"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "needs a function name"),
        ({"role": "assistant", "tool_calls": ["weather"]}, "needs a function name"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "are not JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "an object"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": []}]}, "an object"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 9**5}]}, "not JSON"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": NaN}'}]},
            "NaN is not JSON",
        ),
        ({"role": "assistant", "tool_calls": 5}, "a list of calls, found 5"),
        ("Hi", "an object with a role, found 'Hi'"),
    ],
)
def test_a_message_that_the_format_cannot_say_is_refused(data: Any, fault: str) -> None:
    with pytest.raises(PromptError, match=fault):
        Message.from_dict(data)


# Rendering


def test_a_plain_chat_is_rendered() -> None:
    messages = [Message("system", "Be brief."), Message("user", " Hi\n")]
    assert TEMPLATE.render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_without_thinking_the_think_block_is_empty() -> None:
    assert TEMPLATE.render([Message("user", "Hi")], enable_thinking=False) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_thinking_before_the_last_user_query_is_stripped() -> None:
    messages = [
        Message("user", "1+1?"),
        Message("assistant", "2", thinking="Easy."),
        Message("user", "2+2?"),
        Message("assistant", "4", thinking="Also easy."),
    ]
    assert TEMPLATE.render(messages, add_generation_prompt=False) == (
        "<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nAlso easy.\n</think>\n\n4<|im_end|>\n"
    )


def test_tools_calls_and_results_are_rendered() -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "Umbrella?"),
        Message("assistant", "I look.", thinking="Two days.", tool_calls=(CALL, CALL)),
        Message("tool", "rain"),
        Message("tool", "sun"),
    ]
    tools_line = json.dumps(WEATHER)
    assert TEMPLATE.render(messages, tools=[WEATHER, WEATHER]) == (
        "<|im_start|>system\n"
        "You can call these functions:\n"
        f"<tools>\n{tools_line}\n{tools_line}\n</tools>\n"
        "One call, each tag on its own line: <tool_call><function=NAME><parameter=KEY>VALUE"
        "</parameter></function></tool_call>\n\n"
        "Be brief.<|im_end|>\n"
        "<|im_start|>user\nUmbrella?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nTwo days.\n</think>\n\n"
        f"I look.\n\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n"
        "<|im_start|>user\n"
        "<tool_response>\nrain\n</tool_response>\n"
        "<tool_response>\nsun\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_tools_without_a_system_message_and_a_call_without_content_are_rendered() -> None:
    messages = [Message("user", "Umbrella?"), Message("assistant", tool_calls=(CALL,))]
    text = TEMPLATE.render(messages, tools=[WEATHER], add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\nYou can call these functions:\n<tools>\n")
    assert text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\nUmbrella?<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n\n</think>\n\n{CALL_TEXT}<|im_end|>\n"
    )


def test_strings_are_raw_and_everything_else_is_json() -> None:
    call = ToolCall("f", {"a": 'é "<b>"\n', "c": ["é", None, True], "d": {"k": 1.5}, "e": None})
    assert render_reply(Message("assistant", tool_calls=(call,)), enable_thinking=False) == (
        "<tool_call>\n<function=f>\n"
        '<parameter=a>\né "<b>"\n\n</parameter>\n'
        '<parameter=c>\n["é", null, true]\n</parameter>\n'
        '<parameter=d>\n{"k": 1.5}\n</parameter>\n'
        "<parameter=e>\nnull\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>"
    )


@pytest.mark.parametrize("enable_thinking", [True, False])
@pytest.mark.parametrize("thinking", [None, "Hm.\nYes.", " \n"])
@pytest.mark.parametrize("content", ["", "Done.", "  It is\n\n4 \n"])
@pytest.mark.parametrize("calls", [(), (CALL,), (CALL, ToolCall("now", {}))])
@pytest.mark.parametrize("ends_with_result", [True, False])
def test_generation_prompt_and_reply_make_the_rendered_turn(
    enable_thinking: bool,
    thinking: str | None,
    content: str,
    calls: tuple[ToolCall, ...],
    ends_with_result: bool,
) -> None:
    reply = Message("assistant", content, thinking, calls)
    messages = [Message("user", "Go.")]
    if ends_with_result:
        messages += [Message("assistant", tool_calls=(CALL,)), Message("tool", "rain")]
    if not enable_thinking and (thinking or "").strip():
        with pytest.raises(PromptError, match="enable_thinking is false"):
            render_reply(reply, enable_thinking=enable_thinking)
        return
    prompt = TEMPLATE.render(messages, tools=[WEATHER], enable_thinking=enable_thinking)
    whole = TEMPLATE.render([*messages, reply], tools=[WEATHER], add_generation_prompt=False)
    assert whole == prompt + render_reply(reply, enable_thinking=enable_thinking) + "\n"


def test_a_reply_comes_from_the_assistant() -> None:
    with pytest.raises(PromptError, match="found role 'user'"):
        render_reply(Message("user", "Hi"), enable_thinking=True)


def test_no_messages_is_an_error() -> None:
    with pytest.raises(PromptError, match="at least one message"):
        TEMPLATE.render([])


def test_a_late_system_message_is_refused_by_the_template() -> None:
    messages = [Message("user", "Hi"), Message("system", "Be brief.")]
    with pytest.raises(TemplateError, match="refused the messages: a system message must come fi"):
        TEMPLATE.render(messages)


# Templates of checkpoints


def test_a_folder_brings_its_own_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path).source == DEFAULT_TEMPLATE
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    assert ChatTemplate.load(tmp_path).render([Message("user", "Hi")]) == "Hi!"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}?")
    assert ChatTemplate.load(tmp_path).render([Message("user", "Hi")]) == "Hi?"


@pytest.mark.parametrize(
    "content", ["{", "[]", "[" * 9**5, '{"chat_template": [{"name": "default", "template": "x"}]}']
)
def test_a_damaged_tokenizer_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


def test_a_template_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TemplateError, match=r"chat_template\.jinja: expected UTF-8"):
        ChatTemplate.load(tmp_path)


def test_a_template_finds_what_hugging_face_gives_it() -> None:
    source = (
        "{%- for message in messages %}\n"
        "    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {{- message.role }} {{ tools is none }} {{ enable_thinking }}\n"
        "{%- endfor %}\n"
        " {{ {'b': 'é<', 'a': 1} | tojson(sort_keys=true) }} {{ strftime_now('%%') }}\n"
        "{%- if add_generation_prompt %} go{% endif %}"
    )
    messages = [Message("user", "a"), Message("user", "b")]
    rendered = ChatTemplate(source).render(messages, enable_thinking=False)
    assert rendered == 'user True False {"a": 1, "b": "é<"} % go'


def test_a_syntax_error_is_named_with_its_line() -> None:
    with pytest.raises(TemplateError, match=r"not valid jinja2, line 3: .*'endfor'"):
        ChatTemplate("a\n{% if tools %}\n{% endfor %}")


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{{ ''.__class__ }}", "attribute '__class__' of a str"),
        ("{{ ''.__class__.__mro__ }}", "attribute '__class__' of a str"),
        ("{{ ''['__class__'] }}", "attribute '__class__' of a str"),
        ("{{ ''|attr('__class__') }}", "attribute '__class__' of a str"),
        ("{{ messages|map(attribute='__class__')|list }}", "attribute '__class__' of a dict"),
        ("{{ '{0.__class__}'.format(messages) }}", "attribute '__class__' of a list"),
        ("{{ strftime_now.__globals__ }}", "attribute '__globals__' of a function"),
        ("{{ cycler.__init__.__globals__ }}", "attribute '__init__' of a type"),
        ("{{ messages.append(1) }}", "attribute 'append' of a list"),
        ("{{ messages[0].update(role='x') }}", "attribute 'update' of a dict"),
        ("{{ tools.clear() }}", "attribute 'clear' of a list"),
        ("{{ 'a' * 10 ** 10 }}", "repetition of str is too long"),
        ("{{ 10 ** 10 ** 10 }}", "is too large"),
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str, fault: str) -> None:
    with pytest.raises(TemplateError, match=r"tried to leave its sandbox: .*") as raised:
        ChatTemplate(source).render([Message("user", "Hi")], tools=[WEATHER])
    assert fault in str(raised.value)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("{{ raise_exception('no ' ~ messages[0].role) }}", "refused the messages: no user"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{{ absent.field }}", "UndefinedError: 'absent' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages | tojson(indent=messages) }}", "TypeError"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_a_failing_template_names_its_fault(source: str, fault: str) -> None:
    with pytest.raises(TemplateError) as raised:
        ChatTemplate(source).render([Message("user", "Hi")])
    assert fault in str(raised.value)


# Reading replies


def test_thinking_content_and_calls_are_told_apart() -> None:
    text = f"Two days.\n</think>\n\nI look.\n\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>"
    assert parse_reply(text, starts_in_thinking=True, tools=[WEATHER]) == Message(
        "assistant", "I look.", "Two days.", (CALL, CALL)
    )


@pytest.mark.parametrize(
    ("text", "starts_in_thinking", "content", "thinking"),
    [
        ("", False, "", None),
        ("", True, "", None),
        ("Hi", False, "Hi", None),
        ("Hm", True, "", "Hm"),
        ("\n</think>\n\nHi", True, "Hi", None),
        ("Hm\n</think>\n\n\nA\n\nB\n\n", True, "A\n\nB", "Hm"),
        ("\n\nA\n", False, "A", None),
        (" A ", False, " A ", None),
        ("<think>\nHm\n</think>\n\nHi", False, "Hi", "Hm"),
        ("\n<think>\nHm\n</think>\n\nHi", True, "Hi", "Hm"),
        ("<think", False, "<think", None),
        ("A <think> b </think>", False, "A <think> b </think>", None),
        ("a</think>b</think>c", True, "b</think>c", "a"),
        ("a </thin", True, "", "a </thin"),
        (f"Or {CALL_TEXT}?</think>No.", True, "No.", f"Or {CALL_TEXT}?"),
        ("Hi<|im_end|>\n<|im_start|>user", False, "Hi", None),
        ("Hm<|im_end|>Hi", True, "", "Hm"),
        ("a < b <tool_c", False, "a < b <tool_c", None),
        ("<|im_end|>", False, "", None),
    ],
)
def test_text_without_calls(
    text: str, starts_in_thinking: bool, content: str, thinking: str | None
) -> None:
    found = parse_reply(text, starts_in_thinking=starts_in_thinking)
    assert found == Message("assistant", content, thinking)


def test_text_after_a_call_joins_the_content_by_one_newline() -> None:
    text = f"A\n\n{CALL_TEXT}\n\nB{CALL_TEXT}\n"
    message = parse_reply(text, starts_in_thinking=False, tools=[WEATHER])
    assert message == Message("assistant", "A\nB", tool_calls=(CALL, CALL))


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("5", "5"),
        ("\n5\n", "5"),
        ("\n\n5\n\n", "\n5\n"),
        ("\n  5 \n", "  5 "),
        ("", ""),
        ("\n", ""),
        ("\n\n", ""),
        ("\na < b <c> </p\n", "a < b <c> </p"),
        ("\n</think></tool_call><tool_call></function>\n", None),
        ("\n<parameter=city>\n", "<parameter=city>"),
        ("\n<|im_\n", "<|im_"),
        ("\n</parameter\n", "</parameter"),
    ],
)
def test_one_newline_at_each_end_of_a_value_belongs_to_the_format(
    body: str, value: str | None
) -> None:
    text = f"<tool_call><function=weather><parameter=city>{body}</parameter></function></tool_call>"
    message = parse_reply(text, starts_in_thinking=False, tools=[WEATHER])
    expected = body.strip("\n") if value is None else value
    assert message == Message("assistant", tool_calls=(ToolCall("weather", {"city": expected}),))


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, '"5"', '"5"'),
        ({"type": "string"}, "null", "null"),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, " -5 ", -5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "1.5e3", 1500.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", "True"),
        ({"type": "null"}, "null", None),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": "object"}, '{"a": {"b": null}}', {"a": {"b": None}}),
        ({"type": "object"}, '{"a": ', '{"a": '),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, '"a"', '"a"'),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "number"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "7", "7"),
        ({"oneOf": [{"type": "integer"}, {"type": "array"}]}, "[7]", [7]),
        ({"anyOf": [{"type": "string"}, {}]}, "7", 7),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["on", None]}, "null", None),
        ({"enum": ["null", None]}, "null", "null"),
        ({"anyOf": [{"enum": ["1"]}, {"type": "integer"}]}, "1", "1"),
        ({"const": "1"}, "1", "1"),
        ({"$ref": "#/$defs/Name"}, "5", "5"),
        ({"$ref": "#/$defs/Cycle"}, "5", 5),
        ({"$ref": "#/$defs/Absent"}, "5", 5),
        ({}, "5", 5),
        ({}, '"5"', "5"),
        ({}, "five", "five"),
        (True, "5", 5),
    ],
)
def test_a_value_is_read_by_its_schema(schema: Any, raw: str, value: object) -> None:
    tool = make_tool("f", x=schema)
    tool["function"]["parameters"]["$defs"] = {
        "Name": {"type": "string"},
        "Cycle": {"$ref": "#/$defs/Cycle"},
    }
    call = (
        f"<tool_call>\n<function=f>\n<parameter=x>\n{raw}\n</parameter>\n</function>\n</tool_call>"
    )
    (found,) = parse_reply(call, starts_in_thinking=False, tools=[tool]).tool_calls
    assert found.arguments == {"x": value}
    assert type(found.arguments["x"]) is type(value)


def test_a_parameter_that_is_not_named_is_read_by_additional_properties() -> None:
    tool = make_tool("f", x={"type": "integer"})
    text = "<tool_call><function=f><parameter=y>5</parameter></function></tool_call>"
    assert parse_reply(text, starts_in_thinking=False, tools=[tool]).tool_calls == (
        ToolCall("f", {"y": 5}),
    )
    tool["function"]["parameters"]["additionalProperties"] = {"type": "string"}
    assert parse_reply(text, starts_in_thinking=False, tools=[tool]).tool_calls == (
        ToolCall("f", {"y": "5"}),
    )


def test_without_tools_a_value_is_json_if_it_is_json() -> None:
    assert parse_reply(CALL_TEXT, starts_in_thinking=False).tool_calls == (CALL,)


@pytest.mark.parametrize("raw", ["1e999", "[1e999]", '"\\ud800"', '{"a": "\\ud800"}'])
def test_json_that_nobody_can_write_stays_text(raw: str) -> None:
    text = CALL_TEXT.replace("Oslo", raw)
    (call,) = parse_reply(text, starts_in_thinking=False).tool_calls
    assert call.arguments["city"] == raw


@pytest.mark.parametrize(
    ("tool", "fault"),
    [
        ("weather", "a tool needs a function with a name"),
        ({"function": "weather"}, "a tool needs a function with a name"),
        ({"name": ["weather"]}, "a tool needs a function with a name"),
        ({"name": "weather", "parameters": "x"}, "parameters of tool 'weather'"),
    ],
)
def test_a_tool_that_is_none_is_refused(tool: Any, fault: str) -> None:
    with pytest.raises(PromptError, match=fault):
        ChatParser(starts_in_thinking=False, tools=[tool])


@pytest.mark.parametrize(
    "schema", [{"type": [{}]}, {"type": 5}, {"enum": 5}, {"anyOf": 5}, {"anyOf": [5]}, "integer"]
)
def test_a_schema_that_says_nothing_sensible_allows_anything(schema: Any) -> None:
    tool = make_tool("weather", days=schema)
    (call,) = parse_reply(CALL_TEXT, starts_in_thinking=False, tools=[tool]).tool_calls
    assert call.arguments == {"city": "Oslo", "days": 2}


@pytest.mark.timeout(10)
def test_a_schema_that_refers_to_itself_many_times_is_read_at_once() -> None:
    tool = make_tool("weather", days={"$ref": "#/$defs/Days"})
    cycle = [{"$ref": "#/$defs/Days"}] * 20
    tool["function"]["parameters"]["$defs"] = {"Days": {"anyOf": [{"type": "string"}, *cycle]}}
    (call,) = parse_reply(CALL_TEXT, starts_in_thinking=False, tools=[tool]).tool_calls
    assert call.arguments["city"] == "Oslo"


def test_a_call_of_an_unknown_function_is_still_a_call() -> None:
    text = "<tool_call>\n<function=wether>\n</function>\n</tool_call>"
    message = parse_reply(text, starts_in_thinking=False, tools=[WEATHER])
    assert message.tool_calls == (ToolCall("wether", {}),)


MALFORMED = [
    "<tool_call>",
    "<tool_call>\n</tool_call>",
    '<tool_call>\n{"name": "weather"}\n</tool_call>',
    "<tool_call>\n<function=>\n</function>\n</tool_call>",
    "<tool_call>\n<function=a\nb>\n</function>\n</tool_call>",
    "<tool_call>\n<function=a<b>\n</function>\n</tool_call>",
    "<tool_call>\n<function=wea",
    f"<tool_call>\n<function={'a' * 257}>\n</function>\n</tool_call>",
    f"<tool_call>\n<function={'a' * 300}",
    "<tool_call>\n<function=weather>",
    "<tool_call>\n<function=weather>\n<parameter=",
    "<tool_call>\n<function=weather>\n<parameter=city>",
    "<tool_call>\n<function=weather>\n<parameter=city>\n",
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</param",
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\nx\n</function>",
    "<tool_call>\n<function=weather>\nOslo\n</function>\n</tool_call>",
    "<tool_call>\n<function=weather>\n</tool_call>",
    "<tool_call>\n<function=weather>\n</function>",
    "<tool_call>\n<function=weather>\n</function>\nx</tool_call>",
    "<tool_call><function=f><parameter=a></parameter><parameter=a></parameter></function></tool_call>",
]


@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|im_end|>\nmore"])
@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_becomes_content_as_it_stands(text: str, end: str) -> None:
    message = parse_reply(f"A\n\n{text}{end}", starts_in_thinking=False, tools=[WEATHER])
    assert message == Message("assistant", f"A\n\n{text}".rstrip("\n"))


def test_a_name_may_have_256_characters() -> None:
    text = f"<tool_call>\n<function={'a' * 256}>\n</function>\n</tool_call>"
    for chunks in ([text], list(text)):
        parser = ChatParser(starts_in_thinking=False)
        for chunk in chunks:
            parser.push(chunk)
        assert parser.message.tool_calls == (ToolCall("a" * 256, {}),)


def test_a_call_after_a_malformed_one_is_found() -> None:
    text = f"<tool_call>\n{CALL_TEXT}"
    message = parse_reply(text, starts_in_thinking=False, tools=[WEATHER])
    assert message == Message("assistant", "<tool_call>", tool_calls=(CALL,))


# Reading replies in chunks


def test_deltas_tell_what_became_certain() -> None:
    parser = ChatParser(starts_in_thinking=True, tools=[WEATHER])
    assert parser.push("\nHm") == [ChatDelta(kind="thinking", text="Hm", span=(1, 3))]
    assert parser.push("\n</thi") == []
    assert parser.push("nk>\n\nI look.\n") == [
        ChatDelta(kind="content", text="I look.", span=(14, 21))
    ]
    assert parser.push("\n<tool_call>\n<function=weather") == []
    assert parser.push(">\n<parameter=city>\nOs") == [
        ChatDelta(kind="call_started", text="weather"),
        ChatDelta(kind="argument", text="Os", parameter="city"),
    ]
    assert parser.push("lo\n") == [ChatDelta(kind="argument", text="lo", parameter="city")]
    assert parser.push("</parameter>\n</function>\n") == []
    assert parser.message == Message("assistant", "I look.", "Hm")
    call = ToolCall("weather", {"city": "Oslo"})
    assert parser.push("</tool_call><|im_end|>") == [ChatDelta(kind="call", call=call)]
    assert parser.finish() == []
    assert parser.message == Message("assistant", "I look.", "Hm", (call,))


def test_a_dropped_call_is_told_and_its_text_follows_as_content() -> None:
    parser = ChatParser(starts_in_thinking=False)
    parser.push("A\n<tool_call>\n<function=f>\n")
    assert parser.finish() == [
        ChatDelta(kind="call_dropped"),
        ChatDelta(kind="content", text="\n<tool_call>\n<function=f>", span=(1, 26)),
    ]


def test_nothing_is_read_after_the_end() -> None:
    parser = ChatParser(starts_in_thinking=False)
    parser.push("Hi<|im_end|>")
    assert parser.push("more") == []
    assert parser.finish() == []
    assert parser.push("more") == []
    assert parser.message == Message("assistant", "Hi")
