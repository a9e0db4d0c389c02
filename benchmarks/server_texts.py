"""What the server's benchmark says to the demo model: a long conversation, JSON and tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from servers import Server

# ChatML, with tools as models of this family are told of them.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if loop.first and tools %}{{ 'Tools: ' + (tools | tojson) + '\n' }}{% endif %}"
    "{{ message['content'] }}"
    "{% for tool_call in message.tool_calls or [] %}"
    "{{ '<tool_call>\n' + ({'name': tool_call.function.name, "
    "'arguments': tool_call.function.arguments} | tojson) + '\n</tool_call>' }}"
    "{# tool_call.name #}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

PEOPLE = [
    ("Anna", 31, "Berlin"),
    ("Ben", 45, "Oslo"),
    ("Clara", 28, "Madrid"),
    ("David", 52, "Paris"),
    ("Emma", 19, "Rome"),
    ("Felix", 63, "Vienna"),
    ("Greta", 37, "Prague"),
    ("Hugo", 24, "Lisbon"),
    ("Ida", 41, "Dublin"),
    ("Jonas", 58, "Warsaw"),
]
SHOWN = [("Mia", 22, "London"), ("Karl", 70, "Athens"), ("Lena", 35, "Zurich")]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def conversation(texts: list[str]) -> list[str]:
    """Twenty turns of some 500 tokens each."""
    return [f"Read this:\n\n{text}\n\nIn one sentence, what is it about?" for text in texts]


def _record(server: Server, name: str, age: int, city: str) -> Any:
    """A sentence as a JSON object."""
    messages = [{"role": "system", "content": "You turn sentences into JSON objects."}]
    for who, years, where in SHOWN:
        messages.append({"role": "user", "content": f"{who} is {years} and lives in {where}."})
        shown = json.dumps({"name": who, "age": years, "city": where})
        messages.append({"role": "assistant", "content": shown})
    messages.append({"role": "user", "content": f"{name} is {age} and lives in {city}."})
    try:
        return json.loads(server.chat(messages, 48).choices[0].message.content)
    except ValueError:
        return None


def _call(server: Server, city: str) -> Any:
    """A question that asks for a tool."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You answer with a tool call, and nothing else."}
    ]
    for _, _, where in SHOWN:
        messages.append({"role": "user", "content": f"What is the weather in {where}?"})
        call = {"name": "get_weather", "arguments": json.dumps({"city": where})}
        made = [{"type": "function", "id": where, "function": call}]
        messages.append({"role": "assistant", "content": "", "tool_calls": made})
    messages.append({"role": "user", "content": f"What is the weather in {city}?"})
    calls = server.chat(messages, 48, tools=[TOOL]).choices[0].message.tool_calls
    return [
        (call.function.name, json.loads(call.function.arguments)) for call in calls or []
    ] or None


def objects() -> list[Callable[[Server], Any]]:
    """Ten records and ten tool calls."""
    records = [lambda server, person=person: _record(server, *person) for person in PEOPLE]
    return [*records, *(lambda server, city=city: _call(server, city) for _, _, city in PEOPLE)]
