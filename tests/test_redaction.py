"""Tokens go, words of the trade stay."""

import json
import time
from base64 import b64encode, urlsafe_b64encode
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from launcher.errors import brief
from launcher.lifecycle.log_lines import LogLines
from launcher.printable import printable_bytes
from launcher.redaction import (
    REDACTED,
    is_secret,
    is_secret_variable,
    known_values,
    redact,
    redact_bytes,
)

SHAPED = [
    "hf_" + "aB3" * 11, "sk-" + "a1b2" * 8, "sk-proj-" + "a_-1" * 8, "ghp_" + "a1" * 18,
    "github_pat_" + "a1_" * 10, "AKIA" + "ABCD" * 4, "xoxb-1234567890-abcdef", "AIza" + "x-_1" * 9,
    "eyJhbGciOiJI.eyJzdWIiOiIx.abc-_def12", "wandb_v1_" + "a1" * 20,
]  # fmt: skip


NAMES = (
    "hub_token HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY token use_auth_token "
    "hubToken apiKey password DB_PASSWORD --hub_token OPENAI_API_KEY client_secret ssh-key credentials"
)
NO_NAMES = (
    "eos_token pad_token eos_token_id max_tokens tokens_per_second tokens tokenizer_name get_tokenizer_fn "
    "average_tokens_across_devices sft_messages_key ground_truths_key HF_TOKEN_PATH key secretstorage"
)


def test_secret_names_and_words_of_the_trade() -> None:
    assert all(map(is_secret, NAMES.split()))
    assert not any(map(is_secret, ("", *NO_NAMES.split())))


def test_by_shape_anywhere() -> None:
    for token in SHAPED:
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
]


def test_by_name_in_a_text() -> None:
    for text, clean in TEXTS:
        assert redact(text, {}) == clean.replace("#", REDACTED)


def test_by_name_in_data() -> None:
    data = {
        "hub_token": {"value": "abc", "origin": "a.yaml:3"},
        "eos_token": {"value": "<|im_end|>", "origin": "a.yaml:4"}, "pad_token": "<pad>", "token": "abc",
        "password": ["a", "b"], "api_key": None, "use_auth_token": True, "nested": [{"WANDB_API_KEY": "abc"}],
    }  # fmt: skip
    assert redact(data, {}) == {
        "hub_token": {"value": REDACTED, "origin": "a.yaml:3"},
        "eos_token": {"value": "<|im_end|>", "origin": "a.yaml:4"},
        "pad_token": "<pad>", "token": REDACTED, "password": [REDACTED, REDACTED], "api_key": None,
        "use_auth_token": True, "nested": [{"WANDB_API_KEY": REDACTED}],
    }  # fmt: skip


def test_by_flag_in_a_command_line() -> None:
    argv = ("python", "--hub_token", "abc", "--eos_token", "<s>", "--push_to_hub_token", "False")
    clean = (
        "python",
        "--hub_token",
        REDACTED,
        "--eos_token",
        "<s>",
        "--push_to_hub_token",
        "False",
    )
    assert redact(argv, {}) == clean
    assert redact(list(argv), {}) == list(clean)


def test_by_value_of_the_environment() -> None:
    environ = {"WANDB_API_KEY": "0" * 40, "HF_TOKEN": "unusual-shape", "SHORT_TOKEN": "abc",
               "HF_TOKEN_PATH": "/home/token", "HOME": "/home/someone"}  # fmt: skip
    plain = set(known_values(environ)) & set(environ.values())
    assert plain == {"0" * 40, "unusual-shape"}
    text = f"login {'0' * 40} unusual-shape abc /home/someone"
    assert redact(text, environ) == f"login {REDACTED} {REDACTED} abc /home/someone"


@dataclass(frozen=True, slots=True)
class Thing:
    """Something immutable with texts in it."""

    text: str
    parts: tuple[object, ...]
    place: Path
    hub_token: str = "abc"


def test_types_stay_what_they_are() -> None:
    thing = Thing(text="HF_TOKEN=abc", parts=(1, {"token": "abc"}, None), place=Path("/x"))
    clean = redact(thing, {})
    assert clean == Thing(
        text=f"HF_TOKEN={REDACTED}",
        parts=(1, {"token": REDACTED}, None),
        place=Path("/x"),
        hub_token=REDACTED,
    )
    assert thing.hub_token == "abc"
    assert redact(3.5, {}) == 3.5


def test_half_a_token_is_not_shown_either() -> None:
    token = SHAPED[0]
    for before in range(40):
        shown = redact(brief(f"{'x ' * (before // 2)}{token}{' y' * 80}", 40), {})
        assert token[:6] not in shown


@pytest.mark.parametrize("word", ["eyJ", "x=", "--a"])
def test_a_long_text_takes_no_square_of_its_time(word: str) -> None:
    """Everything that is shown is looked through; a square would be minutes."""
    text = word * (200_000 // len(word))
    begun = time.process_time()
    assert redact(text, {}) == text
    assert time.process_time() - begun < 5


LINES = [
    *SHAPED, *(text for text, _ in TEXTS), "eos_token='<|im_end|>'", "num_tokens: 5, a b", "clé_token=abc",
    "x" * 500 + "_token=abc", "keys: a b", "the token --quiet x", "--hf-token\tabc", "HUB_TOKEN = abc",
    "login unusual-value done", "tokenizer.pad_token_id=3", "", "https://a:b@c",
]  # fmt: skip


@pytest.mark.parametrize("end", ["\n", "\r"])
def test_a_console_is_looked_through_line_by_line(end: str) -> None:
    known = ("unusual-value",)
    lines = [line for text in LINES for line in text.split("\n")]
    clean = [redact(line, {"A_TOKEN": known[0]}) for line in lines]
    assert sum(one != line for one, line in zip(clean, lines, strict=True)) > len(SHAPED) + 10
    raw = b"\xff\xfe \x00" + end.join(["", *lines, ""]).encode() + b"\xc3"
    wanted = b"\xff\xfe \x00" + end.join(["", *clean, ""]).encode() + b"\xc3"
    assert redact_bytes(raw, known) == wanted
    assert redact_bytes(wanted, known) == wanted


@pytest.mark.parametrize("word", ["eyJ", "keytoken", "://:", "basic "])
def test_a_long_console_takes_no_square_of_its_time(word: str) -> None:
    raw = (word * (1_000_000 // len(word))).encode()
    begun = time.process_time()
    assert redact_bytes(raw, ()) == raw
    assert time.process_time() - begun < 10


PEM = "MIIEpAIBAAKCAQEA0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKL\n" * 3 + "Ab3=\n"
SLACK = "https://hooks.slack.com/services/T0000/B0000/x1y2z3abcdef"


SHOWN = [
        ("PGPASSWORD=hunter2", "PGPASSWORD=#"), ("PGPASSWORD: hunter2", "PGPASSWORD: #"),
        ("export DB_PASS='a b' x", "export DB_PASS='#' x"), ("DB_PASS=ab,cd&ef x", "DB_PASS=# x"),
        ("'DB_PASS':'a', 'B': 'c'", "'DB_PASS':'#', 'B': 'c'"), ("SMTP_PASS => a", "SMTP_PASS => #"),
        ("OPENAI_KEY=abc", "OPENAI_KEY=#"), ("MYSQL_PWD=12345678", "MYSQL_PWD=#"),
        ("X_PASSWORD=completed", "X_PASSWORD=#"), ("Password: a1", "Password: #"),
        (f"at {SLACK}, ok", "at https://hooks.slack.com/# ok"),
        ("https://discord.com/api/webhooks/12/a-bcdefg", "https://discord.com/api/webhooks/#"),
        ("https://a.webhook.office.com/webhookb2/1a@2b/IncomingWebhook/3c",
         "https://a.webhook.office.com/webhookb2/#"),
        ("https://a.logic.azure.com:443/b?sp=c&sig=Abc_123", "https://a.logic.azure.com:443/b?sp=c&sig=#"),
        ("https://me:p@ss@host/x", "https://me:#@host/x"),
        ("https://0123456789abcdef01@sentry.io/1", "https://#@sentry.io/1"),
        (f"-----BEGIN RSA PRIVATE KEY-----\n{PEM}-----END RSA PRIVATE KEY-----\nok",
         "-----BEGIN RSA PRIVATE KEY-----#-----END RSA PRIVATE KEY-----\nok"),
        (f"k='-----BEGIN PRIVATE KEY-----\\nDEK-Info: y\\n{PEM!r}",
         "k='-----BEGIN PRIVATE KEY-----#"),
]  # fmt: skip


def test_what_a_console_may_show() -> None:
    for text, clean in SHOWN:
        assert redact(text, {}) == clean.replace("#", REDACTED)
        assert redact_bytes(text.encode(), ()).decode() == clean.replace("#", REDACTED)


READABLE = [
    "Qwen/Qwen2.5-7B", "hf_model", "45901fd00593422a366dc303012b55b4fe5f4241", "a=b=c", "eos_token='<|im_end|>'",
    "unexpected token: foo", "hub_token=None", "hub_token: null", "use_auth_token=True", "output/hf_run/step_100",
    "forward_pass=3", "first_pass: 2 s", "tests pass: 5", "cache_key: a", "CACHE_KEY=ab", "max_tokens=5",
    "total_tokens=12345678", "'num_input_tokens_seen': 1234", "eos_token: </s>", "PWD=/root", "OLDPWD=/x",
    "wandb: View run at https://wandb.ai/a/b/runs/abc123", "https://host:8080/a@b", "the password is wrong",
    "sft_messages_key=messages", "https://huggingface.co/Qwen/Qwen2.5-7B/resolve/main/model.safetensors?download=true",
    "-----BEGIN CERTIFICATE-----", "https://github.com/a/b/actions/workflows/ci2.yml",
]  # fmt: skip


def test_a_console_stays_readable() -> None:
    for text in READABLE:
        assert redact(text, {}) == text
        assert redact_bytes(text.encode(), ()).decode() == text


SECRET_VARIABLES = (
    "MY_TOKEN_B64 LANGFUSE_PK LANGFUSE_SK SSHPASS PGPASS DB_PWD MYSQL_PWD SECRET_B64 X_CRED_JSON HTTP_AUTH GH_TOKEN_2 "
    "APP_KEY_PROD AUTH_HEADER TOKEN_VALUE GHTOKEN CLIENTSECRET SSH_KEY_B64 STORAGE_CREDS REDIS_AUTH HF_TOKEN"
)
HARMLESS_VARIABLES = (
    "TOKENIZERS_PARALLELISM KEYBOARD MAX_TOKENS MAX_TOKEN EOS_TOKEN PASSENGER PWD OLDPWD XDG_STATE_HOME "
    "XDG_SESSION_ID COMPASS BYPASS SSH_AUTH_SOCK XAUTHORITY MONKEY AUTHOR GIT_AUTHOR_NAME TOKEN_LIMIT HF_TOKEN_PATH "
    "SECRETARIAT NUM_PASSES DESKTOP SKIP TASK PATH HOME CACHE_KEY AWS_ACCESS_KEY_ID AUTH_METHOD"
)


def test_parts_of_the_name_of_a_variable_count_wherever_they_stand() -> None:
    assert [name for name in SECRET_VARIABLES.split() if not is_secret_variable(name)] == []
    assert [name for name in HARMLESS_VARIABLES.split() if is_secret_variable(name)] == []
    assert redact("SSHPASS=hunter2 COMPASS=north", {}) == f"SSHPASS={REDACTED} COMPASS=north"
    assert redact({"LANGFUSE_PK": "pk-1"}, {}) == {"LANGFUSE_PK": REDACTED}


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


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["SSHPASS", "LANGFUSE_PK"])
def test_a_secret_is_hidden_however_it_is_spelt(name: str, spelling: str) -> None:
    known = known_values({name: PASSPHRASE})
    shown = redact_bytes(f"login as {SPELLINGS[spelling]} there\n".encode(), known).decode()
    assert REDACTED in shown
    assert SPELLINGS[spelling] not in shown
    kept = shown.replace(REDACTED, "").replace("login as", "").replace("there", "").strip()
    # what stands beside it in the same base64
    assert len(kept) <= 12


def test_what_a_variable_holds_in_base64_is_hidden_in_plain_too() -> None:
    environ = {"MY_TOKEN_B64": b64encode(PASSPHRASE.encode()).decode()}
    assert redact(f"decoded {PASSPHRASE}.", environ) == f"decoded {REDACTED}."
    assert redact(f"raw {environ['MY_TOKEN_B64']}", environ) == f"raw {REDACTED}"


def test_each_line_of_a_secret_of_several_lines_is_hidden() -> None:
    value = '{\n  "client": "a",\n  "private": "q8Wm2-Zk04xPl9-vB"\n}\n'
    known = known_values({"GCP_CREDENTIALS_JSON": value})
    for text in (value, json.dumps(value), repr(value)):
        assert b"q8Wm2" not in redact_bytes(f"read {text}".encode(), known)
    # brackets of one line hide nothing else
    assert redact_bytes(b"{ step 1 }", known) == b"{ step 1 }"


@pytest.mark.parametrize(
    "value", ["1", "true", "False", "none", "0", "yes", "3000000", "/run/secrets/key", "~/key"]
)
def test_short_words_numbers_and_paths_hide_nothing(value: str) -> None:
    assert known_values({"MY_TOKEN_B64": value, "SSHPASS": value}) == ()


def test_a_password_that_is_a_word_hides_no_word() -> None:
    words = "completed not_engaged flash_attention_2 step_1000 1234.5 checkpoint-500 console.log aaaaaaaaaa"
    for word in words.split():
        assert known_values({"X_PASSWORD": word}) == ()
        text = f"finish {word}, X_PASSWORD={word}"
        assert redact(text, {"X_PASSWORD": word}) == f"finish {word}, X_PASSWORD={REDACTED}"
    for other in ("Tr0ub4dor&3", "aBcDeFgHiJ", "correct-horse-battery", "a" * 40):
        assert redact(f"login {other}", {"DB_PASS": other}) == f"login {REDACTED}"


def test_codes_and_states_are_never_secrets() -> None:
    told = {"points": [{"name": "finish", "state": "unknown-key", "text": "unknown-key"}]}
    clean = {"points": [{"name": "finish", "state": "unknown-key", "text": REDACTED}]}
    assert redact(told, {"X_PASSWORD": "unknown-key"}) == clean


@pytest.mark.parametrize("size", [1, 17, 64, 1000])
def test_a_log_is_shown_without_secrets_wherever_it_is_cut(size: int) -> None:
    token, block = SHAPED[0], f"-----BEGIN PRIVATE KEY-----\n{PEM}-----END PRIVATE KEY-----\n"
    for text in (
        f"a\n{block}step 1\n",
        f"one\r 5%|#| 1/9\rlogin HF_TOKEN=abc\nsee {token} there\n\xff {token}",
    ):
        raw, shown = text.encode("latin-1"), LogLines(())
        told = b"".join(
            [*(shown.of(raw[at : at + size]) for at in range(0, len(raw), size)), shown.rest()]
        )
        assert told == redact_bytes(printable_bytes(raw), ())
        assert not any(secret in told for secret in (b"MII", b"Ab3", token.encode()))
