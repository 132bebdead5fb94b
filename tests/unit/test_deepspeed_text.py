"""DeepSpeed files as text: what of JSON's rules people break, what is forgiven, and where the rest is refused."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedlab.config import ConfigError
from speedlab.config.deepspeed.json_parser import parse


def test_plain_json_is_read_without_a_word() -> None:
    parsed = parse('{"a": {"b": [1, 2.5, "x", null, true]}}')
    assert parsed.data == {"a": {"b": [1, 2.5, "x", None, True]}}
    assert parsed.warnings == ()


@pytest.mark.parametrize(
    ("text", "data", "warnings"),
    [
        ('{"a": 1} // end', {"a": 1}, ["one comment (line 1)"]),
        ('# top\r\n{"a": 1, /* two\r\nlines */ "b": 2}', {"a": 1, "b": 2}, ["2 comments (the first in line 1)"]),
        ('{"a": [1, 2,],\n}', {"a": [1, 2]}, ["2 trailing commas (the first in line 1)"]),
        ('{"a": 1, // why\n}', {"a": 1}, ["one comment (line 1)", "one trailing comma (line 1)"]),
        ('{"a//b": "#c /* d */ ,}", "e": "\\"//"}', {"a//b": "#c /* d */ ,}", "e": '"//'}, []),
        (
            '{"a": 1, "a": {"b": 2, "b": 3}}',
            {"a": {"b": 3}},
            ["the key 'b' is twice in one object", "the key 'a' is twice in one object"],
        ),
        ('\ufeff{"a": 1}', {"a": 1}, []),
    ],
)
def test_what_is_forgiven_is_said(text, data, warnings) -> None:
    parsed = parse(text)
    assert parsed.data == data
    assert len(parsed.warnings) == len(warnings)
    for said, start in zip(parsed.warnings, warnings, strict=True):
        assert said.startswith(start)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file holds nothing but space and comments; expected keys and values in { }"),
        ("// x", "the file holds nothing but space and comments; expected keys and values in { }"),
        ("[1]", "line 1, column 1: a DeepSpeed file is one object in { }, but found '['; put it in { }"),
        (
            '// x\n"a": 1',
            "line 2, column 1: a DeepSpeed file is one object in { }, but found '\"'; put it in { }",
        ),
        ('{"a": True}', "line 1, column 7: 'True' is Python; JSON writes true"),
        ('{"NaN": NaN}', "line 1, column 9: NaN is no number that a configuration can hold; give a finite one"),
        ('{"a": -Infinity}', "line 1, column 7: -Infinity is no number"),
        (
            '/* one\n two */ {"a": STAGE}',
            "line 2, column 15: 'STAGE' is no value; if it is a template's placeholder, fill it in; "
            "text needs double quotes",
        ),
        ("{'a': 1}", "line 1, column 2: expected a key in double quotes, but found \"'a'\""),
        ('{"a": 1,, }', "line 1, column 9: expected a key in double quotes, but found ','"),
        ('{"a": [,]}', "line 1, column 8: expecting value, but found ','"),
        ('{"a": 1 "b": 2}', "line 1, column 9: expecting ',' delimiter, but found '\"'"),
        ('{"a": "b\n"}', "line 1, column 9: a text in double quotes runs over the end of its line; close it"),
        ('{"a": "b', "line 1, column 7: a text in double quotes runs over the end of its line; close it"),
        ("{ /* x", "line 1, column 3: this comment is never closed; end it with */"),
        (
            '{"a": {"b": 1},\n"c": {"d": 2\n',
            "line 3, column 1: the file ends before '{' of line 2, column 6 is closed; add what is missing",
        ),
        ('{"a": 1} x', "line 1, column 10: extra data, but found 'x'"),
        ('{"a": ' + "9" * 5000 + "}", "a number in the file cannot be read: "),
        ('{"a": ' + "[" * 100_000, "brackets are nested too deeply for a configuration"),
    ],
)
def test_broken_text_is_refused_where_it_breaks(text, message) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    start = "not valid JSON at " if message.startswith("line") else ""
    assert str(caught.value).startswith(start + message)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(data=st.dictionaries(st.text(), VALUES, max_size=4), indent=st.sampled_from([None, 1]))
def test_every_json_object_is_read_as_json_reads_it(data, indent) -> None:
    parsed = parse(json.dumps(data, indent=indent, ensure_ascii=False))
    assert parsed.data == data
    assert parsed.warnings == ()


@settings(deadline=None, max_examples=200)
@given(text=st.text(alphabet='{}[]",:/*#\\ \n1ax'))
def test_any_text_is_read_or_refused_in_our_words(text) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(text).data, dict)
