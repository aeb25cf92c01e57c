"""A pytest plugin: collects a sample of a peer's suite, runs it on cuflash and writes what came of it.

What to do is in the environment variable CUFLASH_PEER_SUITE, as JSON: suite (its name), count (of cases), report (a
path), seconds (what a case may take), cpu (whether "cuda" is taken for the CPU).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import itertools
import json
import os
import re
import signal
import time
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

import cuflash

from . import suites

SETTINGS = json.loads(os.environ["CUFLASH_PEER_SUITE"])
SUITE = suites.SUITES[SETTINGS["suite"]]
_RESERVED = 6 * 2**30  # bytes that a worker may keep between cases: others need memory too
_OURS = str(Path(cuflash.__file__).parent)


class CpuMode(torch.overrides.TorchFunctionMode):
    """A rehearsal without a GPU: tensors that a case makes on "cuda" are on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def pytest_configure(config):
    if SETTINGS["cpu"]:
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=2**37)
        CpuMode().__enter__()
    for name in SUITE.modules:
        importlib.import_module(name)  # pytest puts the checkout's folder before ours
    if SUITE.sdpa:
        from cuflash.torch import register_sdpa

        register_sdpa()
        torch.nn.attention.activate_flash_attention_impl("cuflash")
    config.cuflash_counts = Counter()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Report(config), "cuflash-report")


# ----------------------------------------------------------------------------------------------------------------------
# Which cases


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Hundreds of thousands of cases are never made: marks that list parameters are replaced by one that lists the sample."""
    if not isinstance(collector, pytest.Module) or not name.startswith("test") or not callable(obj):
        return
    module = collector.obj
    if not hasattr(module, "cuflash_samples"):
        module.cuflash_samples = _sample(module, collector.config.cuflash_counts)
        if SUITE.loop:
            module.itertools = types.SimpleNamespace(product=_product)
    if name not in module.cuflash_samples:
        return
    names, chosen = module.cuflash_samples[name]
    if not chosen:
        return []
    if names:
        obj.pytestmark = [mark for mark in obj.pytestmark if mark.name != "parametrize"]
        rows = [tuple(given[name] for name in names) for _, given in chosen]
        rows = [row[0] for row in rows] if len(names) == 1 else rows
        pytest.mark.parametrize(",".join(names), rows, ids=[case for case, _ in chosen])(obj)


def _sample(module, counts: Counter) -> dict:
    """{test: (names of its parameters, [(case, parameters)])} of the plain functions of a module."""
    found = {}
    for name, obj in vars(module).items():
        if name.startswith("test") and isinstance(obj, types.FunctionType):
            found[name] = suites.Cases(
                name, [_listed(mark) for mark in getattr(obj, "pytestmark", ()) if mark.name == "parametrize"]
            )
    results = {name: cases.choose(SUITE.left_out, SUITE.whole) for name, cases in found.items()}
    allowed = suites.shares({name: len(eligible) for name, (eligible, _) in results.items()}, SETTINGS["count"])
    samples = {}
    for name, (eligible, reasons) in results.items():
        counts["cases"] += len(eligible) + sum(reasons.values())
        counts.update({f"left out: {reason}": number for reason, number in reasons.items()})
        names = [one for mark in found[name].marks for one in mark[0]]
        samples[name] = names, eligible[: allowed[name]]
    return samples


def _listed(mark) -> tuple[list, list]:
    names, values = mark.args[:2]
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    return names, [tuple(value) if len(names) > 1 else (value,) for value in values]


def _product(*listed):
    pairs = itertools.product(*listed)
    return pairs if len(listed) != 2 else (pair for pair in pairs if SUITE.loop(*pair))


def pytest_collection_modifyitems(config, items):
    """Cases that are methods, as PyTorch's are, have been made; those that are not run are taken out."""
    if SUITE.methods:
        eligible = []
        for item in filter(lambda item: SUITE.methods(item.name), items):
            config.cuflash_counts["cases"] += 1
            if reason := SUITE.left_out(item.name, {}):
                config.cuflash_counts[f"left out: {reason}"] += 1
            elif suites.is_torch_drawn(item.name):
                eligible.append(item)
        items[:] = sorted(eligible, key=lambda item: suites.rank(item.name))[: SETTINGS["count"]]
    # Mixed: as many large cases at a time as there are workers would need more memory than there is.
    items.sort(key=lambda item: suites.rank(item.nodeid))


# ----------------------------------------------------------------------------------------------------------------------
# One case


class TookTooLong(Exception):
    pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    def stop(*_):
        raise TookTooLong(f"more than {SETTINGS['seconds']} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SETTINGS["seconds"])
    faulthandler.dump_traceback_later(3 * SETTINGS["seconds"], exit=True)  # a kernel that hangs lets no signal through
    try:
        return (yield)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        if torch.cuda.is_available() and torch.cuda.memory_reserved() > _RESERVED:
            torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """What cuflash says that it does not have is left out, not failed."""
    report = yield
    if call.excinfo and isinstance(call.excinfo.value, NotImplementedError) and _is_ours(call.excinfo.tb):
        text = str(call.excinfo.value).split("; got ")[0]
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, text)
        report.user_properties.append(("left_out", text))
    return report


def _is_ours(traceback) -> bool:
    while traceback.tb_next:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename.startswith(_OURS)


# ----------------------------------------------------------------------------------------------------------------------
# What came of it


def pytest_sessionfinish(session):
    with contextlib.suppress(AttributeError):  # no worker of pytest-xdist
        session.config.workeroutput["cuflash_counts"] = dict(session.config.cuflash_counts)


class Report:
    def __init__(self, config):
        self.config, self.started = config, time.time()
        self.counts, self.outcomes, self.seconds = None, {}, {}
        self.skipped, self.left_out, self.failed = Counter(), Counter(), []
        self.first_case = self.written = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.counts = getattr(node, "workeroutput", {}).get("cuflash_counts", self.counts)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0) + report.duration
        if report.when != "call" and report.passed:
            return
        self.first_case = self.first_case or time.time()
        case = report.nodeid.split("::", 1)[-1]
        self.outcomes[case] = report.outcome
        if report.skipped:
            properties = dict(report.user_properties)
            reason = properties.get("left_out") or re.sub("^Skipped: ", "", report.longrepr[2]) or "the suite says no reason"
            (self.left_out if "left_out" in properties else self.skipped)[reason] += 1
        elif report.failed:
            self.failed.append({"case": case, "error": _last_lines(report.longreprtext)})
        if self.written is None or time.time() > self.written + 2:
            self.write(ended=False)

    def pytest_sessionfinish(self):
        self.write(ended=True)

    def write(self, ended: bool):
        """Now and then too: a run may be ended from outside."""
        self.written = time.time()
        counts = Counter(self.counts or self.config.cuflash_counts)
        outcomes = Counter(self.outcomes.values())
        by_rule = {key.removeprefix("left out: "): number for key, number in counts.items() if key != "cases"}
        slowest = sorted(self.seconds.items(), key=lambda one: -one[1])[:10]
        path = Path(SETTINGS["report"])
        path.with_suffix(".new").write_text(
            json.dumps(
                {
                    "ended": ended,
                    "cases": counts["cases"],
                    "run": len(self.outcomes),
                    "passed": outcomes["passed"],
                    "failed": self.failed,
                    "skipped": dict(self.skipped),
                    "left_out": dict(self.left_out),
                    "left_out_by_name": by_rule,
                    "seconds": round(time.time() - self.started, 1),
                    "seconds_to_first_case": round((self.first_case or time.time()) - self.started, 1),
                    "seconds_of_cases": round(sum(self.seconds.values()), 1),
                    "slowest": {case.split("::", 1)[-1]: round(seconds, 2) for case, seconds in slowest},
                }
            )
        )
        path.with_suffix(".new").replace(path)


def _last_lines(text: str) -> str:
    """What a failure says: pytest marks those lines."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return " | ".join(marked[:4] or text.splitlines()[-1:])[:600]
