"""The secrets of a run."""

import pytest

from rollout.queue.keys import KeysError, RunKeys


def test_keys_are_made_once_and_are_readable_by_nobody_else(tmp_path):
    keys = RunKeys.create(tmp_path)
    assert RunKeys.create(tmp_path) == keys == RunKeys.load(tmp_path)
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "keys").iterdir()} == {0o600}
    assert keys.engine_api_key not in repr(keys) and keys.server_secret not in repr(keys)
    (tmp_path / "keys").chmod(0o755)
    with pytest.raises(KeysError, match="chmod 700"):
        RunKeys.load(tmp_path)


def test_missing_keys_say_who_makes_them(tmp_path):
    with pytest.raises(KeysError, match="the launcher makes"):
        RunKeys.load(tmp_path)
