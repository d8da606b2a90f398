import os
import stat
from pathlib import Path

import pytest

from deployments.stack import cpu_features


def test_a_ceiling_set_by_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert cpu_features.isa_ceiling(tmp_path / "bf16") == {"ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.parametrize(("survives", "expected"), [(True, {}), (False, cpu_features.SAFE_ISA)])
def test_the_probe_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: bool, expected: dict[str, str]
) -> None:
    requested = []
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(cpu_features, "reports_bf16", lambda: True)
    monkeypatch.setattr(cpu_features, "survives_bf16", lambda: requested.append(1) or survives)
    assert cpu_features.isa_ceiling(tmp_path / "bf16") == expected
    assert cpu_features.isa_ceiling(tmp_path / "bf16") == expected
    assert len(requested) == 1


def test_a_cpu_without_the_feature_is_not_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(cpu_features, "reports_bf16", lambda: False)
    assert cpu_features.isa_ceiling(tmp_path / "bf16") == {}
    assert not (tmp_path / "bf16").exists()


def test_the_result_of_the_check_is_stored_for_the_owner_only_and_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(cpu_features, "reports_bf16", lambda: True)
    monkeypatch.setattr(cpu_features, "survives_bf16", lambda: False)
    before = os.umask(0)
    try:
        assert cpu_features.isa_ceiling(tmp_path / "bf16") == cpu_features.SAFE_ISA
    finally:
        os.umask(before)
    (file,) = tmp_path.iterdir()
    assert (file.name, file.read_text()) == ("bf16", "refused")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
