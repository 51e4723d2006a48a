"""``lab.device_occupancy``: which model it takes, and that the work is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab import device_occupancy, models
from lab.device_occupancy import SHOWN, SMOLLM2_135M, choose, main, make_session, measure
from lab.devices import DEVICE_VARIABLE


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a call says of the device is forgotten after the test."""
    monkeypatch.setenv(DEVICE_VARIABLE, "")


def test_the_real_model_where_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAB_MODEL", str(tmp_path / "nowhere"))
    assert choose("auto") == "shape"
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setenv("LAB_MODEL", str(tmp_path))
    assert choose("auto") == "real"
    monkeypatch.setenv("LAB_DRAFT", str(tmp_path / "nowhere"))
    assert choose("auto") == "shape"
    assert choose("tiny") == "tiny"


def test_the_shape_is_the_real_models() -> None:
    try:
        model_path = models.real_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    config = json.loads((Path(model_path) / "config.json").read_text())
    # Its head_dim follows from the others where it is not written.
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    assert {key: config[key] for key in SMOLLM2_135M} == SMOLLM2_135M


@pytest.mark.parametrize("speculative", ["none", "chain"])
def test_a_model_of_another_shape_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, speculative: str
) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 8}
    monkeypatch.setattr(device_occupancy, "SMOLLM2_135M", small)
    make_session("shape", speculative, "cpu", 8, 64, tmp_path).close()
    written = json.loads((tmp_path / "shape" / "config.json").read_text())
    assert small.items() <= written.items()


@pytest.mark.parametrize("speculative", ["none", "chain"])
def test_metrics(speculative: str) -> None:
    found = measure("tiny", speculative, "cpu", batch_size=2, output_len=12, rounds=2)
    assert set(SHOWN) <= found.keys()
    assert 0 < found["forward_occupancy"] <= 1
    assert found["accepted_length"] >= 1


def test_a_batch_of_any_size_finds_room_at_once() -> None:
    """Of 32 requests and 16,384 tokens there was room, whatever was asked for."""
    found = measure("tiny", "none", "cpu", batch_size=80, output_len=200, rounds=1)
    assert found["accepted_length"] == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    options = ["--model", "tiny", "--device", "cpu", "--batch-size", "2", "--output-len", "12"]
    assert main([*options, "--rounds", "1", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["model"], found["device"], found["batch_size"]) == ("tiny", "cpu", 2)
    assert found["engine"].endswith("sglang")
    assert "forward_occupancy" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*options, "--rounds", "0"])


def test_the_device_is_the_laboratorys_and_a_metric_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def found(model: str, speculative: str, device: str, *_: int) -> dict[str, float]:
        seen.append(device)
        return {"tokens_per_s": 5.0}

    monkeypatch.setattr(device_occupancy, "measure", found)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert [main(["--model", "tiny", *more]) for more in ([], ["--device", "cpu"], [])] == [0, 0, 0]
    assert seen == ["cuda", "cpu", "cpu"]
    said = capsys.readouterr().out
    assert "tokens_per_s" in said and "forward_occupancy" not in said
    monkeypatch.setenv(DEVICE_VARIABLE, "tpu")
    with pytest.raises(SystemExit):
        main(["--model", "tiny"])
