"""``make test-restarts``: restart jobs again and again, in every way; all have to meet again.

What is run are real jobs of torchrun on this machine, two ranks each, over gloo.  Exit code 1
if one did not recover in its first restart.
"""

from __future__ import annotations

import argparse
import itertools
import time

from launching import HOW, MOMENTS, SIZE, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="runs of each way")
    parser.add_argument("--only", default="", help="ways whose name contains this")
    arguments = parser.parse_args()
    ways = [(how, "environment") for how in HOW] + [("standalone", "group")]
    failed = False
    for how, way in ways:
        if arguments.only not in f"{how}, {way}":
            continue
        begin, met = time.monotonic(), 0
        variants = itertools.cycle(itertools.product(MOMENTS, range(SIZE)))
        for moment, victim in itertools.islice(variants, arguments.count):
            outcome = run(how, way, victim, moment)
            met += outcome.met
            if not outcome.met:
                print(f"--- {how}, {way}: rank {victim}, {moment}\n{outcome.output}")
        seconds = time.monotonic() - begin
        print(f"{how}, {way}: {met} of {arguments.count} recovered ({seconds:.0f} s)", flush=True)
        failed |= met < arguments.count
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
