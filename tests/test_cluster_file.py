"""Cluster files and keys: what is read is what was written, and what is wrong is named by its key."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from clusters import NODES, cluster, host
from commands import refused
from moesched.cluster.cluster_file import cluster_toml, load_cluster, parse_cluster, require_known_hosts
from moesched.cluster.curve.keys import PUBLIC_NAME, SECRET_NAME, make_keys, read_keys, write_keys
from moesched.cluster.endpoints import endpoint, listening_at
from moesched.cluster.launch_env import rank_given
from moesched.cluster.members import keep_to, node_arguments, share_cores, ssh_command
from moesched.errors import BadInput


def test_a_file_is_read_as_it_was_written_and_in_the_order_of_ranks() -> None:
    written = cluster(host(1, memory="150GB", cores=[0, 2], ssh="me@mac-1"), host(0))
    found = parse_cluster(cluster_toml(written).encode(), "mine.toml")
    assert [each.rank for each in found.hosts] == [0, 1]
    assert found.hosts[1] == written.hosts[0]
    assert found.hosts[1].memory_bytes == 150 * 10**9


STRANGE = NODES[1].public[:-1] + "~"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rank": 0}, r"^mine.toml: hosts\[1\].rank: 0 is the rank of 'mac-0' and of 'mac-1'"),
    ({"rank": 2}, "hosts: the ranks of 2 nodes are 0 to 1, and none has rank 1"),
    ({"key": "abc"}, r"hosts\[1\].key: it has 3 characters, a key has 40"),
    ({"key": STRANGE}, r"hosts\[1\].key: '~' is not a character of a key"),
    ({"key": 8 * "#####"}, r"hosts\[1\].key: '#####' does not decode to four bytes"),
    ({"key": NODES[0].public}, r"hosts\[1\].key"),
    ({"port": 7001}, r"hosts\[1\].port: 7001 is also the port of node 0 \(mac-0\)"),
    ({"port": 70_000}, r"hosts\[1\].port"),
    ({"memory": "much"}, r"hosts\[1\].memory: "),
    ({"address": "-oProxyCommand=true"}, r"^mine.toml: hosts\[1\].address: '-oProxyCommand=true' begins with a dash"),
    ({"command": "moe\0sched"}, r"^mine.toml: hosts\[1\].command: 'moe\\x00sched' has a zero byte, which no host"),
    ({"ssh": "-oProxyCommand=true"}, r"^mine.toml: hosts\[1\].ssh: '-oProxyCommand=true' begins with a dash"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_wrong_of_a_node_is_refused_with_its_place(changes: dict[str, Any], said: str) -> None:
    refused_text(cluster_toml(cluster(host(0), host(1, **changes))), said)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "mac-0"', 'nmae = "mac-0"', r"hosts\[0\]"),
        ("[launcher]", "[launcher", "mine.toml: not a cluster file"),
    ],
)
def test_what_is_no_cluster_file_is_refused(old: str, new: str, said: str) -> None:
    text = cluster_toml(cluster())
    assert old in text
    refused_text(text.replace(old, new), said)


def refused_text(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as error:
        parse_cluster(text.encode(), "mine.toml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("spelling", ["::1", "[::1]", "0:0:0:0:0:0:0:1", "0000::0001"])
def test_an_address_of_ipv6_may_be_spelt_in_any_way(spelling: str) -> None:
    text = cluster_toml(cluster(host(0, address=spelling), host(1, address="::1")))
    assert [each.address for each in parse_cluster(text.encode(), "mine").hosts] == ["::1", "::1"]
    same_port = cluster_toml(cluster(host(0, address=spelling), host(1, address="::1", port=7001)))
    with pytest.raises(BadInput, match=r"hosts\[1\]\.port: 7001 is also the port of node 0"):
        parse_cluster(same_port.encode(), "mine")


def test_an_endpoint_has_brackets_around_an_address_of_ipv6() -> None:
    assert endpoint("::1", 7000) == "tcp://[::1]:7000"
    assert endpoint("fe80::1%en0", 7000) == "tcp://[fe80::1%en0]:7000"
    assert endpoint("10.0.0.1", 7000) == "tcp://10.0.0.1:7000"
    assert endpoint("mac-0.local", 7000) == "tcp://mac-0.local:7000"
    assert [listening_at(each) for each in ("::1", "10.0.0.1", "mac-0.local")] == ["::1", "10.0.0.1", "*"]


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(BadInput, match=r"mine: hosts\[1\].address: 'no such host' is an unknown host"):
        require_known_hosts(cluster(host(0), host(1, address="no such host")), "mine")


def test_a_rank_that_is_not_in_the_file_is_refused() -> None:
    with pytest.raises(BadInput, match=r"--rank is 2, and the cluster file has the ranks 0 to 1"):
        cluster().host(2)


def test_keys_are_written_once_and_the_secret_one_is_its_owners(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys")
    secret = tmp_path / "keys" / SECRET_NAME
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert read_keys(secret) == keys
    assert (tmp_path / "keys" / PUBLIC_NAME).read_text() == keys.public + "\n"
    with pytest.raises(BadInput, match="exists already"):
        write_keys(tmp_path / "keys", make_keys())
    assert read_keys(secret) == keys


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    write_keys(tmp_path)
    (tmp_path / SECRET_NAME).chmod(0o644)
    with pytest.raises(BadInput, match=r"has mode 0644: others may read the key: chmod 600"):
        read_keys(tmp_path / SECRET_NAME)
    with pytest.raises(BadInput, match="moesched keygen"):
        read_keys(tmp_path / "nothing")


def test_keygen_prints_the_line_for_the_cluster_file(tmp_path: Path, command: Any) -> None:
    said = command("keygen", "--out", tmp_path / "keys", "--json")
    assert said.json["key"] == read_keys(Path(said.json["secret_file"])).public
    refused(command("keygen", "--out", tmp_path / "keys"), "exists already")


def test_a_dry_run_prints_what_would_start_the_nodes(tmp_path: Path, command: Any) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_toml(cluster(host(0, ssh="me@mac-0"), host(1, model="/models/a b"))))
    said = command("launch", "/models/m", "--hosts", file, "--policy", "ep_naive", "--dry-run")
    assert said.code == 0
    first, second = said.out.splitlines()
    assert first == f"ssh -o BatchMode=yes -- me@mac-0 'moesched node /models/m --cluster {file} --rank 0'"
    assert "'/models/a b'" in second.replace("'\"'\"'", "'")
    of_one = load_cluster(file).hosts[0]
    assert ssh_command(of_one, node_arguments(file, of_one, Path("/models/m")))[4] == "me@mac-0"


@pytest.mark.parametrize(
    "environment",
    [{"RANK": "1", "WORLD_SIZE": "2"}, {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}],
)
def test_the_rank_is_taken_from_what_torchrun_and_mpirun_set(environment: dict[str, str]) -> None:
    assert rank_given(environment, 2) == 1
    with pytest.raises(BadInput, match="rank 1 of 2 was started"):
        rank_given(environment, 3)
    with pytest.raises(BadInput, match="must be a whole number"):
        rank_given(dict.fromkeys(environment, "many"), 2)


def test_the_rank_is_taken_from_what_mlx_launch_sets(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["127.0.0.1:5000"], ["127.0.0.1:5001"]]')
    assert rank_given({"MLX_RANK": "1", "MLX_HOSTFILE": str(hosts)}, 2) == 1
    assert rank_given({}, 2) is None
    with pytest.raises(BadInput, match=r"cannot read MLX_HOSTFILE .*: No such file"):
        rank_given({"MLX_RANK": "1", "MLX_HOSTFILE": str(tmp_path / "none")}, 2)


def test_cores_are_shared_out_evenly() -> None:
    shares = share_cores(1)
    assert shares[0]
    many = share_cores(len(shares[0]) + 1)
    assert {len(cores) for cores in many} == {1}
    assert set().union(*many) == set(shares[0])


def test_a_core_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadInput, match="cores 4000"):
        keep_to([4000])
