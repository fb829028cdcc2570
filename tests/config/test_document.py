"""YAML files that are right, odd, broken and hostile: values, places, and one clear error."""

import math
from pathlib import Path

import pytest
from conftest import Write
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.config.document import MAX_BYTES, MAX_NODES, Document, parse_scalar, read_yaml
from launcher.errors import Finding, InvalidConfig


def refusal(path: Path) -> Finding:
    with pytest.raises(InvalidConfig) as raised:
        read_yaml(path)
    (finding,) = raised.value.findings
    assert finding.file == str(path)
    return finding


def read(write: Write, text: str | bytes) -> Document:
    return read_yaml(write("a.yaml", text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-1E-5", -1e-5),
        ("1.5e3", 1500.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("8", 8),
        ("-3", -3),
        ("+3", 3),
        ("true", True),
        ("Yes", True),
        ("ON", True),
        ("no", False),
        ("off", False),
        ("null", None),
        ("~", None),
    ],
)
def test_a_plain_scalar_means_what_its_author_meant(write: Write, text: str, value: object) -> None:
    result = read(write, f"a: {text}\n").value["a"]
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize("text", "12e4567 1e5 007 0x10 1_000 1:30 2024-01-01 .nan y None".split())
def test_a_scalar_of_no_known_form_is_text(write: Write, text: str) -> None:
    assert read(write, f"a: {text}\n").value == {"a": text}


@pytest.mark.parametrize("text", ['"8"', "'no'", "!!str 8", "! 8", "|-\n  8", ">-\n  no"])
def test_a_quoted_scalar_is_text(write: Write, text: str) -> None:
    assert isinstance(read(write, f"a: {text}\n").value["a"], str)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_every_key_and_entry_has_its_line(write: Write, newline: str) -> None:
    text = "a: 1\nb:\n  c: [x,\n      y]\n"
    document = read(write, text.replace("\n", newline))
    assert document.value == {"a": 1, "b": {"c": ["x", "y"]}}
    lines = {key: origin.line for key, origin in document.origins.items()}
    assert lines == {"a": 1, "b": 2, "b.c": 3, "b.c[0]": 3, "b.c[1]": 4}


def test_all_duplicate_and_bad_keys_are_named(write: Write) -> None:
    text = "a: 1\nb: 1\na: 2\nargs:\n  x: 1\n  x: 2\n  1: y\n  [k]: z\n  'not a name': w\n"
    document = read(write, text)
    assert [(fault.code, fault.line) for fault in document.faults] == [
        ("duplicate-key", 3),
        ("duplicate-key", 6),
        ("bad-key", 7),
        ("bad-key", 8),
        ("bad-key", 9),
    ]
    assert "line 1" in document.faults[0].message
    assert document.faults[1].key == "args.x"
    assert document.value["args"] == {"x": 2}


def test_aliases_that_explode_are_refused(write: Write) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for number in range(1, 12):
        aliases = ", ".join([f"*a{number - 1}"] * 10)
        lines.append(f"a{number}: &a{number} [{aliases}]")
    assert refusal(write("a.yaml", "\n".join(lines))).code == "too-large"


@pytest.mark.parametrize(
    "text",
    [
        "m: &m {a: 1, b: 2}\nx:\n  a: 5\n  <<: *m\n",
        "m: &m {a: 1, b: 2}\nx:\n  <<: [*m, {b: 9}]\n  a: 5\n",
    ],
)
def test_merge_keys_do_not_override(write: Write, text: str) -> None:
    document = read(write, text)
    assert document.value["x"] == {"a": 5, "b": 2}
    assert document.faults == ()


def test_keys_are_text_as_written(write: Write) -> None:
    document = read(write, "on: 1\nargs: {m: {1e3: x, allenai/a: y}}\n")
    assert document.value == {"on": 1, "args": {"m": {"1e3": "x", "allenai/a": "y"}}}


def test_numbers_beyond_what_python_converts() -> None:
    assert parse_scalar("9" * 5000) == "9" * 5000
    assert math.isinf(parse_scalar("1.0e999"))


def test_a_byte_order_mark_is_skipped(write: Write) -> None:
    assert read(write, b"\xef\xbb\xbfa: 1\n").value == {"a": 1}


def test_aliases_are_copies(write: Write) -> None:
    document = read(write, "a: &x [1, {b: 2}]\nc: *x\n")
    document.value["a"][1]["b"] = 3
    assert document.value["c"] == [1, {"b": 2}]


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        (b"", "empty-file", 1),
        (b"- a\n- b\n", "not-a-mapping", 1),
        (b"a: 1\n---\nb: 2\n", "several-documents", 2),
        (b"a: [1,\nb: 2\n", "broken-yaml", 2),
        (b"a: *nowhere\n", "broken-yaml", 1),
        ("é: é\nb: \a\n".encode(), "broken-yaml", 2),
        (b"a: 1\nb: \xff\n", "not-utf8", 2),
        ("a: 1\n".encode("utf-16"), "not-utf8", 1),
        (b"\x7fELF\x02\n\0\0\0", "binary-file", 2),
        (b'a: "x\\0y"\n', "bad-character", 1),
        (b"a: !!python/object/apply:os.system [ls]\n", "unknown-tag", 1),
        (b"a: !mine x\n", "unknown-tag", 1),
        (b"a: " + b"[" * 100 + b"]" * 100, "too-deep", 1),
        (b"a: [" + b"1," * MAX_NODES + b"]", "too-large", 1),
        (b"a: " + b"x" * MAX_BYTES, "huge-file", None),
    ],
)
def test_bad_content_is_one_error_with_a_place(
    write: Write, text: bytes, code: str, line: int | None
) -> None:
    finding = refusal(write("a.yaml", text))
    assert (finding.code, finding.line, finding.severity) == (code, line, "error")


def test_a_path_that_is_no_file_is_refused(tmp_path: Path, write: Write) -> None:
    assert refusal(tmp_path / "none.yaml").code == "missing-file"
    assert refusal(tmp_path).code == "not-a-file"
    assert refusal(write("a.yaml", "a: 1") / "below.yaml").code == "unreadable-file"
    assert refusal(tmp_path / ("x" * 5000)).code == "unreadable-file"
    assert refusal(Path("a\0b")).code == "unreadable-file"


def test_a_missing_file_names_one_with_a_similar_name(tmp_path: Path, write: Write) -> None:
    similar = write("sft_qwen7b.yaml", "a: 1")
    write("sft_qwn7b.txt", "")
    assert refusal(tmp_path / "sft_qwn7b.yaml").help == f"did you mean {similar}?"
    assert refusal(tmp_path / "no" / "a.yaml").help is None


YAML_LIKE = st.text(alphabet=st.sampled_from("ab: -[]{},&*!|>'\"%@`#?\n\t\r\\1.e~<=$\x85é\0\a"))


@settings(max_examples=200)
@given(st.binary(max_size=200) | YAML_LIKE.map(str.encode))
@example(b"\xfe\xff")
@example(b"a: \xed\xa0\x80")
@example(b"a: &b\n? *b\n: *b")
@example(b"<<: *x")
@example(b"a: !<tag:yaml.org,2002:int> x")
@example(b"%YAML 9.9\n---\na: 1")
def test_anything_is_read_or_refused_with_a_place(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(raw)
    try:
        document = read_yaml(path)
    except InvalidConfig as error:
        findings = error.findings
        assert findings
    else:
        findings = document.faults
        assert isinstance(document.value, dict)
        for origin in document.origins.values():
            assert origin.line is not None
            assert origin.line >= 1
    last_line = raw.count(b"\n") + raw.count(b"\r") + 60
    for finding in findings:
        assert finding.file == str(path)
        assert finding.line is not None
        assert 1 <= finding.line <= last_line
        finding.message.encode()
