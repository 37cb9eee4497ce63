"""A probe's report without a model, and the options of a quick probe, for the tests of probing."""

import math

from hybridize.probing.report import ProbeReport

SMALL = ["--context", "64", "--sequences", "4", "--window", "8", "--device", "cpu", "--method", "swa"]


def made_up_report(by="swa", num_layers=6, keep=(), windows=(8, 20), methods=("swa", "hankel", "retrieval")):
    """Layer l's KL at the first window is kl(l), and everything else follows from it."""
    report = ProbeReport("owner/model", num_layers, 0.5, by, "gka", tuple(keep), 64, list(windows), 4, list(methods))
    report.base = {
        "prose": {"loss": 2.5, "accuracy": 0.0},
        "passkey": {"loss": 0.1, "accuracy": 0.75},
    }
    report.finish([_layer(number, windows, methods) for number in range(num_layers)])
    return report


def kl(layer):
    return 0.02 * abs(math.sin(layer + 1))


def _layer(number, windows, methods):
    parts = {"swa": {}, "hankel": {"no_sinks": {"rank": {"mean": 9.0 - number, "p90": 9.5}}}, "retrieval": {}}
    for place, window in enumerate(windows, 1):
        lost = kl(number) / place
        parts["swa"][str(window)] = {"kl": lost, "loss": lost - 0.001}
        parts["retrieval"][str(window)] = {
            "loss": 2 * lost,
            "kl": lost,
            "accuracy": 0.75 - lost,
            "tasks": {"passkey": {}},
        }
    return {"layer": number, **{method: parts[method] for method in methods}}
