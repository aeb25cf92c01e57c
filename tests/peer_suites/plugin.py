"""A pytest plugin: collects a sample of a peer's suite, runs it on cuflash and writes what came of it.

What to do is in the environment variable CUFLASH_PEER_SUITE, as JSON: suite (its name), count (of cases), report (a
folder), seconds (what a case may take), capability (of the GPU), workers, cpu (whether "cuda" is taken for the CPU), share
(None, or of how many processes that run a suite this one is which).

Collecting imports PyTorch, which takes longer than most cases: it is done once, and the processes that run the cases are forked
from there. So nothing may touch the GPU until then. A suite that does, as PyTorch's helpers do, is collected in each process.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
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
_RESERVED = 2 * 2**30  # bytes that a worker may keep between cases: others need memory too
_TRIES = 6  # after the first, of a case for which there was no memory
FOLDER = Path(SETTINGS["report"])
_OURS = str(Path(cuflash.__file__).parent)


class CpuMode(torch.overrides.TorchFunctionMode):
    """A rehearsal without a GPU: tensors that a case makes on "cuda" are on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def pytest_configure(config):
    sys.path.append(str(Path(__file__).parent / "shims_if_missing"))
    torch.cuda.get_device_capability = lambda *_: tuple(SETTINGS["capability"])
    if SETTINGS["cpu"]:
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=2**37)
        CpuMode().__enter__()
    for name in SUITE.modules:
        importlib.import_module(name)  # pytest puts the checkout's folder before ours
    if SUITE.sdpa:
        from cuflash.torch import register_sdpa

        register_sdpa()
        torch.nn.attention.activate_flash_attention_impl("cuflash")
    config.cuflash_counts = Counter()
    config.cuflash_report = Report()
    config.pluginmanager.register(config.cuflash_report)


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
# Who runs them


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    if session.testsfailed or session.config.option.collectonly or not session.items:
        return None
    counts = dict(session.config.cuflash_counts)
    following = multiprocessing.get_context("fork").Value("i", 0)
    report = session.config.cuflash_report
    if SETTINGS["workers"] > 1 and not SETTINGS["cpu"]:
        _check_that_forks_can_use_the_gpu()
    number, of = SETTINGS["share"] or (0, 1)
    path = FOLDER / f"counts-{number}.json"
    path.write_text(json.dumps(counts | {"chosen": len(session.items)}))
    path.replace(FOLDER / "counts.json")  # as the other shares write it
    if SETTINGS["workers"] == 1:
        _run_cases(session.items[number::of], following, report, number)
        return True
    workers = {}
    for number in range(SETTINGS["workers"]):
        if pid := os.fork():
            workers[pid] = number
            continue
        code = 1
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1), os.dup2(silent, 2)
            _run_cases(session.items, following, report, number)
            code = 0
        finally:
            os._exit(code)
    for pid, number in workers.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            # A hang or a crash of the driver: the process is gone, the case that it was at is not.
            (FOLDER / f"died-{number}.json").write_text(json.dumps({"code": code}))
    return True


def _check_that_forks_can_use_the_gpu() -> None:
    """One tries it: or all cases would fail for a reason that is not theirs."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            torch.zeros(1, device="cuda")
            code = 0
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise pytest.UsageError("the suite has used the GPU while it was collected, so forked processes cannot: --workers 1")


def _run_cases(items, following, report, number: int) -> None:
    report.number = number
    while True:
        with following.get_lock():
            place, following.value = following.value, following.value + 1
        if place >= len(items):
            break
        report.begin(items[place])
        items[place].config.hook.pytest_runtest_protocol(item=items[place], nextitem=None)
    report.write()


# ----------------------------------------------------------------------------------------------------------------------
# One case


class TookTooLong(Exception):
    pass


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    def stop(*_):
        raise TookTooLong(f"more than {SETTINGS['seconds']} s")

    signal.signal(signal.SIGALRM, stop)
    tries = 0
    try:
        while True:
            signal.alarm(SETTINGS["seconds"])
            # A kernel that hangs lets no signal through.
            faulthandler.dump_traceback_later(3 * SETTINGS["seconds"], exit=True)
            try:
                return item.runtest() if tries else (yield)
            except Exception as error:
                tries += 1
                if tries > _TRIES or "out of memory" not in str(error).lower():
                    raise
            # The other workers hold it, and each case ends soon.
            signal.alarm(0)
            item.config.cuflash_report.tried_again()
            torch.cuda.empty_cache()
            time.sleep(2 * tries)
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


class Report:
    """What came of the cases of one process, in a file of its own."""

    def __init__(self):
        self.number, self.cases, self.case = None, {}, None

    def begin(self, item) -> None:
        self.case = item.nodeid.split("::", 1)[-1]
        self.cases[self.case] = {"outcome": "unfinished", "seconds": 0.0, "began": time.time()}
        self.write()  # the process may be ended from outside, or by what the case calls

    def tried_again(self) -> None:
        self.cases[self.case]["tried_again"] = self.cases[self.case].get("tried_again", 0) + 1

    def pytest_runtest_logreport(self, report):
        one = self.cases[self.case]
        one["seconds"] += report.duration
        if report.when != "call" and report.passed or one["outcome"] == "failed":
            return
        one["outcome"] = report.outcome
        if report.skipped:
            properties = dict(report.user_properties)
            one["outcome"] = "left_out" if "left_out" in properties else "skipped"
            one["why"] = properties.get("left_out") or re.sub("^Skipped(: )?", "", report.longrepr[2]) or "the suite does not say"
        elif report.failed:
            one["why"] = _last_lines(report.longreprtext)

    def write(self) -> None:
        path = FOLDER / f"cases-{self.number}.json"
        path.with_suffix(".new").write_text(json.dumps(self.cases))
        path.with_suffix(".new").replace(path)


def _last_lines(text: str) -> str:
    """What a failure says: pytest marks those lines."""
    marked = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return " | ".join(marked[:4] or text.splitlines()[-1:])[:600]
