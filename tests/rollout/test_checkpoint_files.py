"""A checkpoint's file that is not as it was written is found, whatever happened to it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.checkpoint_files import SumsError, complete, damage, digest, write_sums

FILES = {"__0_0.distcp": b"\x00\x01" * 5000, "__1_0.distcp": b"weights", ".metadata": b"m", "kestrel.json": b"{}", "empty": b""}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "version-3"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    write_sums(folder, {"__1_0.distcp": digest(folder / "__1_0.distcp")})
    return folder


def test_a_checkpoint_as_it_was_written_is_whole(checkpoint: Path) -> None:
    assert damage(checkpoint) is None
    (checkpoint / "a file of somebody else").write_text("is no part of it")
    assert damage(checkpoint) is None


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_any_flipped_bit_and_any_other_length_is_found(checkpoint: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FILES)))
    content = FILES[name]
    kinds: list[st.SearchStrategy[bytes]] = [st.binary(min_size=1, max_size=9).map(lambda more: content + more)]
    if content:
        bits = st.integers(0, 8 * len(content) - 1)
        kinds += [st.integers(0, len(content) - 1).map(lambda size: content[:size]), bits.map(lambda bit: flipped(content, bit))]
    (checkpoint / name).write_bytes(data.draw(st.one_of(kinds)))
    found = damage(checkpoint)
    (checkpoint / name).write_bytes(content)
    assert found is not None and found.startswith(f"{checkpoint / name} is damaged")


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_file_that_is_gone_is_named(checkpoint: Path) -> None:
    (checkpoint / "__1_0.distcp").unlink()
    assert damage(checkpoint) == f"{checkpoint / '__1_0.distcp'} cannot be read (No such file or directory)"


def test_processes_that_share_the_work_find_what_one_finds(checkpoint: Path) -> None:
    (checkpoint / "empty").write_text("no longer")
    names = sorted(FILES)
    found = [damage(checkpoint, names[rank::3]) for rank in range(3)]
    assert [fault for fault in found if fault] == [damage(checkpoint)]


@pytest.mark.parametrize("broken", [Path.unlink, lambda path: path.write_bytes(b"\xff\xff")], ids=["gone", "garbage"])
def test_without_readable_digests_a_checkpoint_is_refused_with_the_way_on(
    checkpoint: Path, broken: Callable[[Path], object]
) -> None:
    broken(checkpoint / "SHA256SUMS")
    with pytest.raises(SumsError, match=r"accept them: \(cd|bring it back"):
        damage(checkpoint)


def test_the_command_that_accepts_a_checkpoint_without_digests_works(checkpoint: Path) -> None:
    (checkpoint / "SHA256SUMS").unlink()
    with pytest.raises(SumsError) as refused:
        damage(checkpoint)
    subprocess.run(["bash", "-c", str(refused.value).partition("accept them: ")[2]], check=True)
    assert damage(checkpoint) is None


def test_sha256sum_reads_the_digests_too(checkpoint: Path) -> None:
    check = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
    assert subprocess.run(check, cwd=checkpoint).returncode == 0
    (checkpoint / ".metadata").write_bytes(b"n")
    assert subprocess.run(check, cwd=checkpoint, capture_output=True).returncode == 1


def test_checkpoints_are_listed_from_the_oldest_on(tmp_path: Path) -> None:
    for name in ("version-10", "version-9", "version-11.partial", "version-12.damaged", "version-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "version-13").write_text("a file")
    assert complete(tmp_path) == [(9, tmp_path / "version-9"), (10, tmp_path / "version-10")]
