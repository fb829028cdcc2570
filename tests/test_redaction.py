"""Tokens are hidden, words of the trade stay. `#` stands for `<redacted>` in the tables."""

import json
import time
from base64 import b64encode, urlsafe_b64encode
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from launcher.errors import shorten
from launcher.lifecycle.log_lines import LogLines
from launcher.printable import make_printable_bytes
from launcher.redaction import (
    REDACTED,
    find_secret_values,
    is_secret,
    is_secret_variable,
    redact,
    redact_bytes,
)

HF = "hf_" + "aB3" * 11
SHAPED = [
    HF,
    "sk-" + "a1b2" * 8,
    "sk-proj-" + "a_-1" * 8,
    "ghp_" + "a1" * 18,
    "github_pat_" + "a1_" * 10,
    "AKIA" + "ABCD" * 4,
    "xoxb-1234567890-abcdef",
    "AIza" + "x-_1" * 9,
    "eyJhbGciOiJI.eyJzdWIiOiIx.abc-_def12",
    "wandb_v1_" + "a1" * 20,
]
SECRET_NAMES = """
hub_token HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY token use_auth_token
hubToken apiKey password DB_PASSWORD --hub_token OPENAI_API_KEY client_secret ssh-key credentials
"""
HARMLESS_NAMES = """
eos_token pad_token eos_token_id max_tokens tokens_per_second tokens tokenizer_name key
get_tokenizer_fn average_tokens_across_devices sft_messages_key ground_truths_key HF_TOKEN_PATH
secretstorage
"""
SECRET_VARIABLES = """
MY_TOKEN_B64 LANGFUSE_PK LANGFUSE_SK SSHPASS PGPASS DB_PWD MYSQL_PWD SECRET_B64 X_CRED_JSON
HTTP_AUTH GH_TOKEN_2 APP_KEY_PROD AUTH_HEADER TOKEN_VALUE GHTOKEN CLIENTSECRET SSH_KEY_B64
STORAGE_CREDS REDIS_AUTH HF_TOKEN
"""
HARMLESS_VARIABLES = """
TOKENIZERS_PARALLELISM KEYBOARD MAX_TOKENS MAX_TOKEN EOS_TOKEN PASSENGER PWD OLDPWD XDG_STATE_HOME
XDG_SESSION_ID COMPASS BYPASS SSH_AUTH_SOCK XAUTHORITY MONKEY AUTHOR GIT_AUTHOR_NAME TOKEN_LIMIT
HF_TOKEN_PATH SECRETARIAT NUM_PASSES DESKTOP SKIP TASK PATH HOME CACHE_KEY AWS_ACCESS_KEY_ID
AUTH_METHOD
"""
PEM = "MIIEpAIBAAKCAQEA0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL\n" * 3 + "Ab3=\n"
SLACK = "https://hooks.slack.com/services/T0000/B0000/x1y2z3abcdef"
TEAMS = "https://a.webhook.office.com/webhookb2/"
AZURE = "https://a.logic.azure.com:443/b?sp=c&sig="


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_the_name_of_a_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["", *HARMLESS_NAMES.split()])
def test_the_name_of_no_secret(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("name", SECRET_VARIABLES.split())
def test_the_name_of_a_secret_variable(name: str) -> None:
    """A part of the name counts wherever it stands."""
    assert is_secret_variable(name)


@pytest.mark.parametrize("name", HARMLESS_VARIABLES.split())
def test_the_name_of_a_harmless_variable(name: str) -> None:
    assert not is_secret_variable(name)


@pytest.mark.parametrize("token", SHAPED)
def test_a_token_is_known_by_its_shape(token: str) -> None:
    for text in (token, f"see {token}, ok", f"https://x/{token}/y", f"'{token}'"):
        assert redact(text, {}) == text.replace(token, REDACTED)


TEXTS = [
    ("│   hub_token='a b c',", "│   hub_token='#',"),
    ("--hub_token=abc --seed 8", "--hub_token=# --seed 8"),
    ("launch sft x.yaml --hub_token abc --seed 8", "launch sft x.yaml --hub_token # --seed 8"),
    ("override `hub_token=abc`", "override `hub_token=#`"),
    ("hub_token: abc", "hub_token: #"),
    ('{"hub_token": "a b"}', '{"hub_token": "#"}'),
    ("WANDB_API_KEY=0123abc launch", "WANDB_API_KEY=# launch"),
    ("Authorization: Bearer abcdefghijklmnop", "Authorization: Bearer #"),
    ("https://me:pass@host/x", "https://me:#@host/x"),
    ("extra:\n  hub_token: abc\n", "extra:\n  hub_token: #\n"),
    ("error: hub_token: abc", "error: hub_token: #"),
    ("--hub_token '<redacted>' --seed 8", "--hub_token '#' --seed 8"),
    ("SSHPASS=hunter2 COMPASS=north", "SSHPASS=# COMPASS=north"),
    ("PGPASSWORD=hunter2", "PGPASSWORD=#"),
    ("PGPASSWORD: hunter2", "PGPASSWORD: #"),
    ("export DB_PASS='a b' x", "export DB_PASS='#' x"),
    ("DB_PASS=ab,cd&ef x", "DB_PASS=# x"),
    ("'DB_PASS':'a', 'B': 'c'", "'DB_PASS':'#', 'B': 'c'"),
    ("SMTP_PASS => a", "SMTP_PASS => #"),
    ("OPENAI_KEY=abc", "OPENAI_KEY=#"),
    ("MYSQL_PWD=12345678", "MYSQL_PWD=#"),
    ("X_PASSWORD=completed", "X_PASSWORD=#"),
    ("Password: a1", "Password: #"),
    (f"at {SLACK}, ok", "at https://hooks.slack.com/# ok"),
    ("https://discord.com/api/webhooks/12/a-bcdefg", "https://discord.com/api/webhooks/#"),
    (f"{TEAMS}1a@2b/IncomingWebhook/3c", f"{TEAMS}#"),
    (f"{AZURE}Abc_123", f"{AZURE}#"),
    ("https://me:p@ss@host/x", "https://me:#@host/x"),
    ("https://0123456789abcdef01@sentry.io/1", "https://#@sentry.io/1"),
    (
        f"-----BEGIN RSA PRIVATE KEY-----\n{PEM}-----END RSA PRIVATE KEY-----\nok",
        "-----BEGIN RSA PRIVATE KEY-----#-----END RSA PRIVATE KEY-----\nok",
    ),
    (f"k='-----BEGIN PRIVATE KEY-----\\nDEK-Info: y\\n{PEM!r}", "k='-----BEGIN PRIVATE KEY-----#"),
]


@pytest.mark.parametrize(("text", "clean"), TEXTS)
def test_a_secret_is_known_by_the_name_beside_it(text: str, clean: str) -> None:
    expected = clean.replace("#", REDACTED)
    assert redact(text, {}) == expected
    assert redact_bytes(text.encode(), ()).decode() == expected


@pytest.mark.parametrize(
    "text",
    [
        "Qwen/Qwen2.5-7B",
        "hf_model",
        "45901fd00593422a366dc303012b55b4fe5f4241",
        "a=b=c",
        "eos_token='<|im_end|>'",
        "unexpected token: foo",
        "hub_token=None",
        "hub_token: null",
        "use_auth_token=True",
        "output/hf_run/step_100",
        "forward_pass=3",
        "first_pass: 2 s",
        "tests pass: 5",
        "cache_key: a",
        "CACHE_KEY=ab",
        "max_tokens=5",
        "total_tokens=12345678",
        "'num_input_tokens_seen': 1234",
        "eos_token: </s>",
        "PWD=/root",
        "OLDPWD=/x",
        "wandb: View run at https://wandb.ai/a/b/runs/abc123",
        "https://host:8080/a@b",
        "the password is wrong",
        "sft_messages_key=messages",
        "https://huggingface.co/Qwen/Qwen2.5-7B/resolve/main/model.safetensors?download=true",
        "-----BEGIN CERTIFICATE-----",
        "https://github.com/a/b/actions/workflows/ci2.yml",
    ],
)
def test_a_console_stays_readable(text: str) -> None:
    assert redact(text, {}) == text
    assert redact_bytes(text.encode(), ()).decode() == text


def test_a_secret_in_data_is_known_by_its_key() -> None:
    eos_token = {"value": "<|im_end|>", "origin": "a.yaml:4"}
    data = {
        "hub_token": {"value": "abc", "origin": "a.yaml:3"},
        "eos_token": eos_token,
        "token": "abc",
        "password": ["a", "b"],
        "api_key": None,
        "use_auth_token": True,
        "nested": [{"LANGFUSE_PK": "abc"}],
    }
    assert redact(data, {}) == {
        "hub_token": {"value": REDACTED, "origin": "a.yaml:3"},
        "eos_token": eos_token,
        "token": REDACTED,
        "password": [REDACTED, REDACTED],
        "api_key": None,
        "use_auth_token": True,
        "nested": [{"LANGFUSE_PK": REDACTED}],
    }


def test_a_secret_in_a_command_line_is_known_by_its_flag() -> None:
    argv = ("python", "--hub_token", "abc", "--eos_token", "<s>", "--push_to_hub_token", "False")
    clean = ("python", "--hub_token", REDACTED, *argv[3:])
    assert redact(argv, {}) == clean
    assert redact(list(argv), {}) == list(clean)


@dataclass(frozen=True, slots=True)
class Record:
    text: str
    parts: tuple[object, ...]
    place: Path
    hub_token: str = "abc"


def test_a_record_stays_of_its_type() -> None:
    record = Record(text="HF_TOKEN=abc", parts=(1, {"token": "abc"}, None), place=Path("/x"))
    assert redact(record, {}) == Record(
        text=f"HF_TOKEN={REDACTED}",
        parts=(1, {"token": REDACTED}, None),
        place=Path("/x"),
        hub_token=REDACTED,
    )
    assert record.hub_token == "abc"
    assert redact(3.5, {}) == 3.5


def test_codes_and_states_are_never_secrets() -> None:
    point = {"name": "finish", "state": "unknown-key", "text": "unknown-key"}
    clean = {**point, "text": REDACTED}
    assert redact({"points": [point]}, {"X_PASSWORD": "unknown-key"}) == {"points": [clean]}


# -- values of the environment


def test_a_secret_is_known_by_the_variable_that_holds_it() -> None:
    environ = {
        "WANDB_API_KEY": "0" * 40,
        "HF_TOKEN": "unusual-shape",
        "SHORT_TOKEN": "abc",
        "HF_TOKEN_PATH": "/home/token",
        "HOME": "/home/someone",
    }
    text = f"login {'0' * 40} unusual-shape abc /home/token /home/someone"
    clean = f"login {REDACTED} {REDACTED} abc /home/token /home/someone"
    assert redact(text, environ) == clean


PASSPHRASE = "Tr0ub4dor&3/x="
SPELLINGS = {
    "as it is": PASSPHRASE,
    "in a URL": quote(PASSPHRASE, safe=""),
    "in a URL, in lower case": quote(PASSPHRASE, safe="").lower().replace("tr0", "Tr0"),
    "in base64": b64encode(PASSPHRASE.encode()).decode(),
    "in base64 for URLs": urlsafe_b64encode(PASSPHRASE.encode()).decode(),
    "with a user in base64": b64encode(f"me:{PASSPHRASE}".encode()).decode(),
    "in base64, a byte later": b64encode(f"a:{PASSPHRASE}@host".encode()).decode(),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_secret_is_hidden_however_it_is_spelt(spelling: str) -> None:
    values = find_secret_values({"SSHPASS": PASSPHRASE})
    shown = redact_bytes(f"login as {spelling} there\n".encode(), values).decode()
    assert REDACTED in shown
    assert spelling not in shown
    # what stands beside it in the same base64
    rest = shown.replace(REDACTED, "").removeprefix("login as").removesuffix("there\n")
    assert len(rest.strip()) <= 12


def test_a_value_in_base64_is_hidden_in_plain_text_too() -> None:
    environ = {"MY_TOKEN_B64": b64encode(PASSPHRASE.encode()).decode()}
    assert redact(f"decoded {PASSPHRASE}.", environ) == f"decoded {REDACTED}."
    assert redact(f"raw {environ['MY_TOKEN_B64']}", environ) == f"raw {REDACTED}"


def test_each_line_of_a_secret_of_several_lines_is_hidden() -> None:
    value = '{\n  "client": "a",\n  "private": "q8Wm2-Zk04xPl9-vB"\n}\n'
    values = find_secret_values({"GCP_CREDENTIALS_JSON": value})
    for text in (value, json.dumps(value), repr(value)):
        assert b"q8Wm2" not in redact_bytes(f"read {text}".encode(), values)
    # brackets of one line hide nothing else
    assert redact_bytes(b"{ step 1 }", values) == b"{ step 1 }"


@pytest.mark.parametrize(
    "value", ["1", "true", "False", "none", "0", "yes", "3000000", "/run/secrets/key", "~/key"]
)
def test_short_words_numbers_and_paths_hide_nothing(value: str) -> None:
    assert find_secret_values({"MY_TOKEN_B64": value, "SSHPASS": value}) == ()


@pytest.mark.parametrize(
    "word",
    [
        "completed",
        "not_engaged",
        "flash_attention_2",
        "step_1000",
        "1234.5",
        "checkpoint-500",
        "console.log",
        "aaaaaaaaaa",
    ],
)
def test_a_password_that_is_a_word_hides_no_word(word: str) -> None:
    text = f"finish {word}, X_PASSWORD={word}"
    assert redact(text, {"X_PASSWORD": word}) == f"finish {word}, X_PASSWORD={REDACTED}"


@pytest.mark.parametrize("value", ["Tr0ub4dor&3", "aBcDeFgHiJ", "correct-horse-battery", "a" * 40])
def test_another_password_is_hidden(value: str) -> None:
    assert redact(f"login {value}", {"DB_PASS": value}) == f"login {REDACTED}"


# -- long and cut texts


def test_half_a_token_is_not_shown_either() -> None:
    for words in range(20):
        text = f"{'x ' * words}{HF}{' y' * 80}"
        assert HF[:6] not in redact(shorten(text, 40), {})


@pytest.mark.parametrize("word", ["eyJ", "x=", "--a"])
def test_a_long_text_takes_no_square_of_its_time(word: str) -> None:
    """Everything that is shown is looked through; a square would be minutes."""
    text = word * (200_000 // len(word))
    start = time.process_time()
    assert redact(text, {}) == text
    assert time.process_time() - start < 5


@pytest.mark.parametrize("word", ["eyJ", "keytoken", "://:", "basic "])
def test_a_long_console_takes_no_square_of_its_time(word: str) -> None:
    raw = word.encode() * (1_000_000 // len(word))
    start = time.process_time()
    assert redact_bytes(raw, ()) == raw
    assert time.process_time() - start < 10


LINES = [
    *SHAPED,
    "--hub_token=abc --seed 8",
    "eos_token='<|im_end|>'",
    "num_tokens: 5, a b",
    "clé_token=abc",
    "x" * 500 + "_token=abc",
    "keys: a b",
    "the token --quiet x",
    "--hf-token\tabc",
    "HUB_TOKEN = abc",
    "login unusual-value done",
    "tokenizer.pad_token_id=3",
    "",
    "https://a:b@c",
]


@pytest.mark.parametrize("end", ["\n", "\r"])
def test_a_console_is_looked_through_line_by_line(end: str) -> None:
    value = "unusual-value"
    clean = [redact(line, {"A_TOKEN": value}) for line in LINES]
    raw = b"\xff\xfe \x00" + end.join(["", *LINES, ""]).encode() + b"\xc3"
    expected = b"\xff\xfe \x00" + end.join(["", *clean, ""]).encode() + b"\xc3"
    assert redact_bytes(raw, (value,)) == expected
    assert redact_bytes(expected, (value,)) == expected


@pytest.mark.parametrize("size", [1, 17, 64, 1000])
@pytest.mark.parametrize(
    "text",
    [
        f"a\n-----BEGIN PRIVATE KEY-----\n{PEM}-----END PRIVATE KEY-----\nstep 1\n",
        f"one\r 5%|#| 1/9\rlogin HF_TOKEN=abc\nsee {HF} there\n\xff {HF}",
    ],
    ids=["key", "token"],
)
def test_a_log_is_shown_without_secrets_wherever_it_is_cut(text: str, size: int) -> None:
    raw = text.encode("latin-1")
    lines = LogLines(())
    shown = b""
    for start in range(0, len(raw), size):
        shown += lines.of(raw[start : start + size])
    shown += lines.rest()
    assert shown == redact_bytes(make_printable_bytes(raw), ())
    for secret in (b"MII", b"Ab3", HF.encode()):
        assert secret not in shown
