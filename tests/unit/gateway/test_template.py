import random
from datetime import datetime

import pytest

from pagefleet_gateway.sandbox.template import ChatTemplate, ChatTemplateError, TemplateSource

USER = {"messages": [{"role": "user", "content": 'say "é" <b>'}]}


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(USER)


def test_blocks_leave_no_lines_behind():
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}"
    assert render(source) == "user\n"


def test_json_is_not_escaped_for_html():
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "say \\"é\\" <b>"}'


def test_json_takes_indent():
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_special_tokens_that_the_model_lacks_are_empty():
    assert render("{{ bos_token }}|{{ eos_token }}", bos_token="<s>") == "<s>|"


def test_generation_blocks_are_their_content():
    assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "auserb"


def test_loops_can_be_left():
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"


def test_dates_are_todays():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_dates_are_those_of_the_time_that_it_is_told():
    time, format = random.randrange(10**9), "%d %b %Y %H:%M:%S"
    source = "{% macro now() %}{{ strftime_now('" + format + "') }}{% endmacro %}{{ now() }}"
    rendered = ChatTemplate(source, {}).render(USER | {"strftime_now": time})
    assert rendered == datetime.fromtimestamp(time).strftime(format)


def test_tools_are_none_unless_given():
    assert render("{{ tools is none }}") == "True"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ 'a' + none }}", "can only concatenate str"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_failing_template_is_one_error(source, reason):
    with pytest.raises(ChatTemplateError, match=reason):
        render(source)


def test_a_malformed_template_is_refused_with_its_line():
    with pytest.raises(ChatTemplateError, match="malformed in line 2"):
        render("a\n{% for %}")


def test_a_template_in_place_of_the_models_has_to_be_there_and_be_text(tmp_path):
    with pytest.raises(ChatTemplateError, match=r"\(--chat-template\) cannot be read"):
        TemplateSource.load(tmp_path, tmp_path / "missing.jinja")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ChatTemplateError, match="UTF-8"):
        TemplateSource.load(tmp_path, tmp_path / "binary")
    assert TemplateSource.load(tmp_path) is None
