"""The training benchmark without a GPU: what it compares, its record, and that all backends train alike."""

import importlib
import json

import numpy as np
import pytest
from click.testing import CliRunner

command = importlib.import_module("cuflash.cli.bench")
train, table = (command.library(name) for name in ("train", "table"))


@pytest.fixture(autouse=True)
def text(monkeypatch):
    words = np.frombuffer(b"def attention(q, k, v): return softmax(q @ k.T) @ v\n" * 40, np.uint8)
    monkeypatch.setattr(train, "text", lambda: words)


SIZES = ["--device", "cpu", "--layers", "2", "--hidden", "32", "--heads", "2", "--seqlen", "16", "--tokens", "64"]


def invoke(*args):
    return CliRunner().invoke(train.main, [*SIZES, *map(str, args)])


def test_weights_and_batches():
    setting = train.Setting(layers=2, hidden=32, heads=2, seqlen=16, tokens=64, steps=3)
    weights = train.initial_weights(setting)
    assert sum(x.size for x in weights.values()) == setting.parameters and setting.batch == 4
    assert {x.dtype for x in weights.values()} == {np.dtype(np.float32)}
    assert train.batches(setting).shape == (3, 4, 17)
    assert (train.batches(setting) == train.batches(setting)).all()
    assert setting.rate(0) == pytest.approx(setting.learning_rate / 20) and setting.rate(99) == setting.learning_rate


def test_the_text_is_there():
    importlib.reload(train)
    data = train.text()
    assert len(data) > 10**6 and b"import" in data[:100000].tobytes()


def run(backend, losses, seed=0, **more):
    return {"framework": "torch", "backend": backend, "seqlen": 8, "seed": seed, "steps": len(losses), "losses": losses} | more


def test_agreement():
    falling = [5 - 0.01 * i for i in range(30)]
    runs = [
        run("cuflash", [x + 0.01 for x in falling]),
        run("sdpa_flash", [x + 0.3 for x in falling]),
        run("unfused", falling[:20]),
        run("cuflash", [x + 0.11 for x in falling], seed=1),
        {"framework": "torch", "backend": "sdpa_cudnn", "seqlen": 8, "seed": 0, "steps": 30, "failed": "not there"},
    ]
    ours, longer, theirs = train.agreements(runs)
    assert ours["backend"] == "cuflash" and ours["reference"] == "unfused" and ours["steps"] == 20 and ours["ok"]
    assert ours["mean_difference"] == pytest.approx(0.01) and ours["spread_of_seeds"] == pytest.approx(0.1)
    assert (theirs["backend"], theirs["reference"], theirs["steps"]) == ("sdpa_flash", "unfused", 20) and not theirs["ok"]
    # The reference goes no further than 20 steps: the next one that does.
    assert (longer["backend"], longer["reference"], longer["steps"]) == ("cuflash", "sdpa_flash", 30) and not longer["ok"]
    assert train.agreements(runs[:3]) == []  # no second seed
    assert train.merged(runs, [run("cuflash", [1.0])])[0]["losses"] == [1.0] and len(train.merged(runs, [run("fa3", [1.0])])) == 6


@pytest.mark.parametrize("framework, backends", [("torch", "cuflash,sdpa_flash,unfused"), ("jax", "cuflash,xla")])
def test_all_train_alike(framework, backends, tmp_path):
    pytest.importorskip(framework)
    if framework == "jax":
        pytest.importorskip("cuflash.jax")
    path = tmp_path / "record.json"
    done = invoke("--framework", framework, "--backends", backends, "--steps", 12, "--json", path)
    assert done.exit_code == 0, done.output
    record = json.loads(path.read_text())
    first, *others = record["runs"]
    for one in others[:-1]:
        assert one["losses"] == pytest.approx(first["losses"], abs=2e-4)
    assert record["agreements"] and all(one["ok"] for one in record["agreements"])
    assert first["losses"][-1] < first["losses"][0] - 0.05
    assert others[-1]["seed"] == 1 and others[-1]["losses"][0] != first["losses"][0]


def test_a_record_grows_and_is_a_table(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "record.json"
    assert invoke("--backends", "cuflash", "--steps", 4, "--no-spread", "--json", path).exit_code == 0
    done = invoke("--backends", "unfused,sdpa_cudnn", "--steps", 4, "--unfused-steps", 3, "--no-spread", "--json", path)
    assert "sdpa_cudnn, seed 0, 4 steps: FAILED" in done.output
    record = json.loads(path.read_text())
    assert [one["backend"] for one in record["runs"]] == ["cuflash", "unfused", "sdpa_cudnn"]
    assert [one["steps"] for one in record["runs"]] == [4, 3, 4]
    printed = CliRunner().invoke(table.main, [str(path)]).output
    assert "| torch, seqlen 16 | tokens/s | ms a step | GiB |" in printed and "| unfused | " in printed
    record["environment"]["kernels_digest"] = "other"
    path.write_text(json.dumps(record))
    assert "of other kernels" in invoke("--backends", "cuflash", "--steps", 2, "--no-spread", "--json", path).output


def test_wrong_use():
    assert "--backends must be of cuflash, xla, cudnn; got fa3" in invoke("--framework", "jax", "--backends", "fa3").output
    assert "--hidden must be a multiple of --heads; got 32 and 3" in invoke("--heads", 3).output


def test_table_of_suites():
    one = {"of": "tests/test_x.py", "run": 9, "passed": 5, "failed": [{}, {}], "skipped": {"a": 1}, "left_out": {}, "cases": 13}
    lines = table.markdown({"kind": "peer_suites", "suites": {"fa2": one}})
    assert lines[-1] == "| fa2: tests/test_x.py | 9 | 5 | 2 | 1 | 0 | 13 |"
