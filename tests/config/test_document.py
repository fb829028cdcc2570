"""YAML files that are right, odd, broken and hostile: values, places, and one clear error."""

import math
from pathlib import Path
from typing import Any

import pytest
from conftest import Write
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launcher.config.document import MAX_BYTES, MAX_NODES, Document, plain, read_yaml
from launcher.errors import Finding, InvalidConfig


def fault(path: Path) -> Finding:
    with pytest.raises(InvalidConfig) as raised:
        read_yaml(path)
    (finding,) = raised.value.findings
    assert finding.file == str(path)
    return finding


def read(write: Write, text: str | bytes) -> Document:
    return read_yaml(write("a.yaml", text))


PLAIN: tuple[tuple[str, Any], ...] = (
    ("1e-5", 1e-5), ("-1E-5", -1e-5), ("1.5e3", 1500.0), ("1.", 1.0), (".5", 0.5), ("8", 8), ("-3", -3), ("+3", 3),
    ("true", True), ("Yes", True), ("ON", True), ("no", False), ("off", False), ("null", None), ("~", None),
    *((text, text) for text in "12e4567 1e5 007 0x10 1_000 1:30 2024-01-01 .nan y None".split()),
)  # fmt: skip


def test_a_plain_scalar_means_what_its_author_meant(write: Write) -> None:
    for text, value in PLAIN:
        found = read(write, f"a: {text}\n").value["a"]
        assert (found, type(found)) == (value, type(value))
    for text in ('"8"', "'no'", '"1e-5"', "!!str 8", "! 8", "|-\n  8", ">-\n  no"):
        assert isinstance(read(write, f"a: {text}\n").value["a"], str)


def test_every_key_and_entry_has_its_line(write: Write) -> None:
    for newline in ("\n", "\r\n", "\r"):
        document = read(write, newline.join(["a: 1", "b:", "  c: [x,", "      y]", ""]))
        assert document.value == {"a": 1, "b": {"c": ["x", "y"]}}
        assert {key: origin.line for key, origin in document.origins.items()} == {
            "a": 1, "b": 2, "b.c": 3, "b.c[0]": 3, "b.c[1]": 4,
        }  # fmt: skip
    # all duplicate and bad keys at once
    text = "a: 1\nb: 1\na: 2\nargs:\n  x: 1\n  x: 2\n  1: y\n  [k]: z\n  'not a name': w\n"
    document = read(write, text)
    found = [(f.code, f.line) for f in document.faults]
    assert found == [*(("duplicate-key", n) for n in (3, 6)), *(("bad-key", n) for n in (7, 8, 9))]
    assert "line 1" in document.faults[0].message
    assert document.faults[1].key == "args.x"
    assert document.value["args"] == {"x": 2}
    # aliases that explode are stopped
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert fault(write("a.yaml", "\n".join(lines))).code == "too-large"


@pytest.mark.parametrize("text", ["m: &m {a: 1, b: 2}\nx:\n  a: 5\n  <<: *m\n",
                                  "m: &m {a: 1, b: 2}\nx:\n  <<: [*m, {b: 9}]\n  a: 5\n"])  # fmt: skip
def test_merge_keys_do_not_override(write: Write, text: str) -> None:
    document = read(write, text)
    assert document.value["x"] == {"a": 5, "b": 2}
    assert document.faults == ()


def test_keys_and_scalars_are_text_as_written(write: Write) -> None:
    assert read(write, "on: 1\nargs: {m: {1e3: x, allenai/a: y}}\n").value == {
        "on": 1,
        "args": {"m": {"1e3": "x", "allenai/a": "y"}},
    }
    assert plain("9" * 5000) == "9" * 5000
    assert math.isinf(plain("1.0e999"))
    # a byte order mark is skipped
    assert read(write, b"\xef\xbb\xbfa: 1\n").value == {"a": 1}
    # aliases are copies
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
        (b"a:\n\tb: 1\n", "broken-yaml", 2),
        (b"a: 'x\n", "broken-yaml", 1),
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
    found = fault(write("a.yaml", text))
    assert (found.code, found.line, found.severity) == (code, line, "error")


def test_missing_directory_and_unreadable(tmp_path: Path, write: Write) -> None:
    assert fault(tmp_path / "none.yaml").code == "missing-file"
    assert fault(tmp_path).code == "not-a-file"
    assert fault(write("a.yaml", "a: 1") / "below.yaml").code == "unreadable-file"
    assert fault(tmp_path / ("x" * 5000)).code == "unreadable-file"
    assert fault(Path("a\0b")).code == "unreadable-file"


def test_what_may_be_meant_by_a_file_that_is_not_there(tmp_path: Path, write: Write) -> None:
    near = write("sft_qwen7b.yaml", "a: 1")
    write("sft_qwn7b.txt", "")
    assert fault(tmp_path / "sft_qwn7b.yaml").help == f"did you mean {near}?"
    assert fault(tmp_path / "no" / "a.yaml").help is None


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
        found = error.findings
        assert found
    else:
        found = document.faults
        assert isinstance(document.value, dict)
        assert all(o.line is not None and o.line >= 1 for o in document.origins.values())
    lines = raw.count(b"\n") + raw.count(b"\r") + 60
    for finding in found:
        assert finding.file == str(path)
        assert finding.line is not None and 1 <= finding.line <= lines
        finding.message.encode()
