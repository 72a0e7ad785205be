"""Certify ``oneccl_cpu``: every rule up to L2, its payloads over oneCCL's own library.

``python tests/oneccl_library/certify.py FOLDER CERTIFICATE``, with the folder that
``prepare.py`` filled.  Exits with 1 if L2 is not reached.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from commlayer_testkit.conformance import Lab, Level, Subject, judge
from commlayer_testkit.conformance.report import certify

from oneccl_library import library
from oneccl_library.backend import OneCclCpuBackend


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("certificate", type=Path)
    arguments = parser.parse_args()
    os.environ.update(library.environment(str(arguments.folder.resolve())))
    subject = Subject(OneCclCpuBackend())
    verdicts = []
    with Lab(subject) as lab:
        for rule in subject.rules(Level.L2):
            verdicts.append(judge(rule, lab))
            print(f"{rule.id:24} {verdicts[-1].outcome.value}", flush=True)
    certificate = certify(subject, Level.L2, verdicts, {})
    arguments.certificate.write_bytes(certificate.encode() + b"\n")
    print(f"oneccl_cpu: {certificate.level and certificate.level.value} reached")
    for name, error in certificate.errors.items():
        print(f"{name}: {error}", file=sys.stderr)
    return int(not certificate.ok)


if __name__ == "__main__":
    sys.exit(main())
