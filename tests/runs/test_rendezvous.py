"""Where a machine stands among several, by options or by Slurm, and the command that it runs."""

import socket

import pytest
from plans import CONFIGS, build_command, load_stage, make_plan

from launcher.errors import UsageError
from launcher.runs import rendezvous
from launcher.runs.rendezvous import Rendezvous, find_rendezvous

SLURM = {
    "SLURM_JOB_ID": "12345",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
}


@pytest.fixture
def names_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_can_resolve", lambda _: True)


def slurm_rendezvous(**changes: str) -> Rendezvous:
    place = find_rendezvous(2, None, None, {**SLURM, **changes})
    assert place is not None
    return place


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("10.0.0.4", "10.0.0.4", 29500),
        ("head:1234", "head", 1234),
        ("[fe80::1%eth0]:1", "[fe80::1%eth0]", 1),
    ],
)
def test_options_name_the_first_machine(address: str, host: str, port: int) -> None:
    expected = Rendezvous(nodes=3, rank=2, address=host, port=port)
    assert find_rendezvous(3, 2, address, {}) == expected


@pytest.mark.parametrize(
    ("nodes", "rank", "address", "code"),
    [
        (2, 0, None, "no-main-address"),
        (2, None, "head", "no-node-rank"),
        (2, 2, "head", "bad-node-rank"),
        (1, 1, None, "bad-node-rank"),
        (2, 0, "head:65536", "bad-main-address"),
        (2, 0, "$(touch pwned)", "bad-main-address"),
    ],
)
def test_options_that_cannot_be(
    nodes: int, rank: int | None, address: str | None, code: str
) -> None:
    with pytest.raises(UsageError) as refused:
        find_rendezvous(nodes, rank, address, {})
    (finding,) = refused.value.findings
    assert finding.code == code
    assert finding.help


@pytest.mark.usefixtures("names_resolve")
def test_slurm_names_the_first_machine() -> None:
    assert slurm_rendezvous() == Rendezvous(nodes=2, rank=1, address="gpu007", port=20345)


def test_a_name_that_only_slurm_knows_is_replaced_by_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_can_resolve", lambda _: False)
    assert slurm_rendezvous().address == "10.0.0.7"


def test_options_win_over_slurm() -> None:
    expected = Rendezvous(nodes=2, rank=1, address="other", port=1)
    assert find_rendezvous(2, None, "other:1", SLURM) == expected


@pytest.mark.usefixtures("names_resolve")
def test_two_jobs_on_one_node_listen_at_two_ports() -> None:
    ports = set()
    for job in ("1", "2", "11999"):
        port = slurm_rendezvous(SLURM_JOB_ID=job).port
        assert 1024 < port < 32768
        ports.add(port)
    assert len(ports) == 3


def test_a_step_of_another_shape_is_refused() -> None:
    with pytest.raises(UsageError, match="16 process"):
        slurm_rendezvous(SLURM_STEP_NUM_TASKS="16")


def test_a_batch_script_alone_is_no_step() -> None:
    batch = {"SLURM_JOB_ID": "12345", "SLURM_NODEID": "0"}
    with pytest.raises(UsageError) as refused:
        find_rendezvous(2, None, None, batch)
    assert refused.value.findings[0].code == "wrong-step"


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n1", "n1"),
        ("node[007-012,20],login1", "node007"),
        ("a,b[1-2]", "a"),
        ("r[1-2]n[3,5]", "r1n3"),
        ("gpu-[2]-ib", "gpu-2-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_node_list(nodelist: str, first: str) -> None:
    assert rendezvous.find_first_host(nodelist) == first


def test_a_taken_port_is_refused_on_the_first_machine_alone() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first = Rendezvous(nodes=2, rank=0, address="head", port=port)

        with pytest.raises(UsageError) as refused:
            rendezvous.check_port(first)
        assert refused.value.findings[0].code == "port-taken"

        rendezvous.check_port(Rendezvous(nodes=2, rank=1, address="head", port=port))
    rendezvous.check_port(first)


@pytest.mark.parametrize("deepspeed", ["none", "zero2"])
def test_the_command_of_each_node(deepspeed: str) -> None:
    overrides = [f"deepspeed={deepspeed}", "batch.per_device=8", "exp_name=NODE_RANK"]
    stage = load_stage(CONFIGS / "tulu" / "sft_qwen7b.yaml", overrides)
    template = build_command(make_plan(stage, 8, nodes=2)).argv
    second = Rendezvous(nodes=2, rank=1, address="10.0.0.4", port=1234)

    argv = rendezvous.fill_placeholders(template, second)

    options = ["--machine_rank", "--main_process_ip", "--main_process_port"]
    values = [argv[argv.index(option) + 1] for option in options]
    assert values == ["1", "10.0.0.4", "1234"]
    # and nothing else, whatever it is called
    replaced = [old for old, new in zip(template, argv, strict=True) if old != new]
    assert replaced == list(rendezvous.OPTIONS.values())

    first = Rendezvous(nodes=2, rank=0, address="10.0.0.4", port=1234)
    expected = rendezvous.fill_placeholders(template, first)
    assert rendezvous.fill_placeholders(argv, first) == expected
    assert rendezvous.fill_placeholders(template, None) == template
