"""Probes: measure what a transport's completion means, and compare it with what is declared.

`probe` measures a plugin's backend, `probe_c10d` a backend of ``torch.distributed``
without one.  An `Experiment` is two throw-away ranks and a judge; `completion`,
`memory`, `ordering`, `failure` and `devices` hold them, `here` is what they work
with, `link` what they see of the transport, `run` starts them, `report` compares.
"""

from commlayer_testkit.conformance.probes.facts import fact_names
from commlayer_testkit.conformance.probes.report import FactReport, ProbeReport, Verdict
from commlayer_testkit.conformance.probes.run import probe, probe_c10d

__all__ = ["FactReport", "ProbeReport", "Verdict", "fact_names", "probe", "probe_c10d"]
