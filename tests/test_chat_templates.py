"""Chat templates: those of a model's files, written as Hugging Face's transformers writes them."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from fronts import TINY, front
from gguf_headers import byte_pairs, number, string
from moesched.errors import BadInput
from moesched.inputs.chat_template import ChatTemplate, find_chat_template
from moesched.server.template_worker import Renderer, answer, serve
from moesched.server.templates import ModelTemplate
from patience import wait_for_end

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": "1 < 2 & é?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "marks around each message": """{{ bos_token }}{% for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    "a namespace, and the system message apart": """
{%- set seen = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% set seen.system = message.content %}{% continue %}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {{- '[INST] ' ~ seen.system ~ message.content ~ ' [/INST]' if message.role == 'user' else message.content }}
{%- endfor %}""",
    "JSON": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools is none }}{{ documents is none }}",
    "a mark for training": """{% set turn = 0 %}{% for message in messages %}
  {% generation %}
    {% set turn = turn + 1 %}{{ message.content }}{{ turn }}
  {% endgeneration %}
{% endfor %}{{ turn }}""",
    "macros, slices and tests": """{% macro mark(role) %}<{{ role | upper }}>{% endmacro %}
{% for message in messages[1:] %}{{ mark(message.role) }}{{ message.content.split(' ')[-1] }}
{% endfor %}{{ messages | length }}{{ nothing is defined }}{{ messages[-1]['name'] is defined }}""",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_conversation_is_written_as_transformers_writes_it(template: str) -> None:
    [expected], _ = render_jinja_template(
        [CHAT], chat_template=template, add_generation_prompt=True, **SPECIAL
    )
    assert Renderer(template, SPECIAL).render(CHAT) == expected


def test_a_template_may_ask_for_the_date() -> None:
    assert Renderer("{{ strftime_now('%Y') }}", {}).render(CHAT).isdigit()


FAULTS = {
    "raises": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "reaches for Python": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "changes its input": ("{{ messages.append(1) }}", "append"),
    "counts too far": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "divides by 0": ("{{ 1 / 0 }}", "division by zero"),
    "never ends its calls": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
}


@pytest.mark.parametrize(("template", "fault"), FAULTS.values(), ids=FAULTS)
def test_what_a_template_does_wrong_is_its_fault(template: str, fault: str) -> None:
    reply = answer(Renderer(template, SPECIAL), json.dumps(CHAT).encode())
    assert fault in reply["fault"]


def test_a_text_that_is_no_template_is_said_to_be_none() -> None:
    out = io.BytesIO()
    serve(io.BytesIO(b'{"text": "{% for %}", "special": {}}\n'), out)
    assert "line 1" in json.loads(out.getvalue())["fault"]


# ---------------------------------------------------------------- the process that renders


async def test_a_template_that_loops_or_says_too_much_is_ended_and_the_next_conversation_is_written() -> None:
    loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    text = "{% if messages[0].content == 'loop' %}" + loops + "{% endif %}{{ messages[0].content }}"

    template = ModelTemplate(ChatTemplate(text), seconds=0.2, most_bytes=1000)
    await template.start()
    with pytest.raises(BadInput, match="takes too long"):
        await template.render([{"role": "user", "content": "loop"}])
    with pytest.raises(BadInput, match="too much memory"):
        await template.render([{"role": "user", "content": "a" * 5000}])
    assert await template.render([{"role": "user", "content": "é\n"}]) == "é\n"
    await template.close()


async def test_a_process_that_was_killed_while_it_was_idle_is_started_again() -> None:
    before = {*psutil.Process().children()}
    template = ModelTemplate(ChatTemplate("{{ messages[0].content }}"))
    await template.start()
    [worker] = {*psutil.Process().children()} - before
    worker.kill()
    wait_for_end(worker.pid)
    for _ in range(200):  # until the event loop has seen it
        await asyncio.sleep(0)
    try:
        assert await template.render([{"role": "user", "content": "b"}]) == "b"
    finally:
        await template.close()


async def test_a_conversation_that_is_left_while_the_process_starts_leaves_no_reply_for_the_next_one() -> (
    None
):
    template = ModelTemplate(ChatTemplate("{{ messages[0].content }}"))
    left = asyncio.ensure_future(template.render([{"role": "user", "content": "a"}]))
    for _ in range(200):  # until the process is started, long before it replies
        await asyncio.sleep(0)
    left.cancel()
    try:
        assert await template.render([{"role": "user", "content": "b"}]) == "b"
    finally:
        await template.close()


async def test_a_chat_that_the_template_does_not_take_is_a_bad_request() -> None:
    class Refusing:
        bare = True

        async def render(self, messages: object) -> str:
            raise BadInput("the chat template does not take these messages: roles must alternate")

    async with front(template=Refusing()) as server:
        body = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
        response = await server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert "roles must alternate" in response.json()["error"]["message"]


# ---------------------------------------------------------------- files


def written(folder: Path, **config: Any) -> Path:
    """A model's folder with this tokenizer_config.json."""
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_template_of_a_folder_is_that_of_its_tokenizer_configuration(tmp_path: Path) -> None:
    bos = {"content": "<s>", "lstrip": False}
    model = written(tmp_path, chat_template="{{ a }}", bos_token=bos, eos_token="</s>", pad_token=None)
    assert find_chat_template(model) == ChatTemplate("{{ a }}", {"bos_token": "<s>", "eos_token": "</s>"})


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert find_chat_template(written(tmp_path, chat_template=several)) == ChatTemplate("plain")


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own", "utf-8")
    assert find_chat_template(written(tmp_path, chat_template="other")) == ChatTemplate("own")


def test_a_gguf_file_has_its_template_in_its_metadata(tmp_path: Path) -> None:
    header = byte_pairs()
    header.set("tokenizer.chat_template", string("{{ bos_token }}"))
    header.set("tokenizer.ggml.bos_token_id", number(1))
    found = find_chat_template(header.write(tmp_path / "model.gguf"))
    assert found is not None
    assert found.text == "{{ bos_token }}"
    assert found.special["bos_token"] == "<s>"


def test_the_model_of_the_examples_has_none() -> None:
    assert find_chat_template(TINY) is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "tokenizer_config.json"),
        ('{"chat_template": 5}', "chat_template"),
        ('{"bos_token": [1]}', "bos_token"),
    ],
)
def test_a_damaged_configuration_is_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(BadInput, match=says):
        find_chat_template(tmp_path)
