"""Where a node stands among several: options, Slurm; and the command that it runs."""

import socket

import pytest
from plans import CONFIGS, built, planned, staged

from launcher.errors import UsageError
from launcher.runs import rendezvous
from launcher.runs.rendezvous import Rendezvous

SLURM = {
    "SLURM_JOB_ID": "12345", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}  # fmt: skip


def code(error: pytest.ExceptionInfo[UsageError]) -> str:
    return error.value.findings[0].code


@pytest.mark.parametrize(
    ("given", "host", "port"),
    [
        ("10.0.0.4", "10.0.0.4", 29500),
        ("head:1234", "head", 1234),
        ("[fe80::1%eth0]:1", "[fe80::1%eth0]", 1),
    ],
)
def test_by_options(given: str, host: str, port: int) -> None:
    expected = Rendezvous(nodes=3, rank=2, address=host, port=port)
    assert rendezvous.find_rendezvous(3, 2, given, {}) == expected


@pytest.mark.parametrize(
    ("nodes", "rank", "address", "expected"),
    [
        (2, 0, None, "no-main-address"), (2, None, "head", "no-node-rank"),
        (2, 2, "head", "bad-node-rank"), (1, 1, None, "bad-node-rank"),
        (2, 0, "head:65536", "bad-main-address"), (2, 0, "$(touch pwned)", "bad-main-address"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(
    nodes: int, rank: int | None, address: str | None, expected: str
) -> None:
    with pytest.raises(UsageError) as error:
        rendezvous.find_rendezvous(nodes, rank, address, {})
    assert code(error) == expected
    assert error.value.findings[0].help


def test_by_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_resolves", lambda _: True)
    found = rendezvous.find_rendezvous(2, None, None, SLURM)
    assert found == Rendezvous(nodes=2, rank=1, address="gpu007", port=20345)
    # a name that only Slurm knows
    monkeypatch.setattr(rendezvous, "_resolves", lambda _: False)
    found = rendezvous.find_rendezvous(2, None, None, SLURM)
    assert found is not None
    assert found.address == "10.0.0.7"
    # options win
    found = rendezvous.find_rendezvous(2, None, "other:1", SLURM)
    assert found == Rendezvous(nodes=2, rank=1, address="other", port=1)
    # two jobs on one node meet elsewhere
    ports = set()
    for job in ("1", "2", "11999"):
        found = rendezvous.find_rendezvous(2, None, None, {**SLURM, "SLURM_JOB_ID": job})
        assert found is not None
        ports.add(found.port)
    assert len(ports) == 3
    assert all(1024 < port < 32768 for port in ports)
    # a step of another shape is refused
    with pytest.raises(UsageError) as error:
        rendezvous.find_rendezvous(2, None, None, {**SLURM, "SLURM_STEP_NUM_TASKS": "16"})
    assert code(error) == "wrong-step"
    # a batch script alone is no step
    batch = {k: v for k, v in SLURM.items() if not k.startswith("SLURM_STEP")}
    with pytest.raises(UsageError) as error:
        rendezvous.find_rendezvous(2, None, None, {**batch, "SLURM_NODEID": "0"})
    assert code(error) == "wrong-step"


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("n1", "n1"), ("node[007-012,20],login1", "node007"), ("a,b[1-2]", "a"),
        ("r[1-2]n[3,5]", "r1n3"), ("gpu-[2]-ib", "gpu-2-ib"), ("", ""),
    ],
)  # fmt: skip
def test_first_host(listed: str, first: str) -> None:
    assert rendezvous.first_host(listed) == first


def test_a_taken_port_is_said_before() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        here = Rendezvous(nodes=2, rank=0, address="head", port=taken.getsockname()[1])
        with pytest.raises(UsageError) as error:
            rendezvous.check_port(here)
        assert code(error) == "port-taken"
        # it is the first machine's alone
        rendezvous.check_port(Rendezvous(nodes=2, rank=1, address="head", port=here.port))
    rendezvous.check_port(here)
    rendezvous.check_port(None)


@pytest.mark.parametrize("deepspeed", ["none", "zero2"])
def test_the_command_of_each_node(deepspeed: str) -> None:
    words = [f"deepspeed={deepspeed}", "batch.per_device=8", "exp_name=NODE_RANK"]
    stage = staged(CONFIGS / "tulu" / "sft_qwen7b.yaml", words)
    argv = built(planned(stage, 8, nodes=2)).argv
    here = Rendezvous(nodes=2, rank=1, address="10.0.0.4", port=1234)
    made = rendezvous.fill_placeholders(argv, here)
    told = {option: made[made.index(option) + 1] for option in rendezvous.OPTIONS}
    assert told == {
        "--machine_rank": "1",
        "--main_process_ip": "10.0.0.4",
        "--main_process_port": "1234",
    }
    assert made[made.index("--exp_name") + 1] == "NODE_RANK"
    changed = [a for a, b in zip(argv, made, strict=True) if a != b]
    assert changed == list(rendezvous.OPTIONS.values())
    # what was filled in for one node can be for another
    other = Rendezvous(nodes=2, rank=0, address="10.0.0.4", port=1234)
    assert rendezvous.fill_placeholders(made, other) == rendezvous.fill_placeholders(argv, other)
    assert rendezvous.fill_placeholders(argv, None) == argv
