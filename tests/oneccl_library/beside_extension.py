"""Load the oneccl plugin in one process with ``intel-extension-for-pytorch``.

``python tests/oneccl_library/beside_extension.py``, in the environment that ``make
test-oneccl`` made: the extension wants a torch of its own version.  On Intel's devices it is
imported before the ``ccl`` bindings; its wheel for the CPU shows that torch, extension and
plugin load together, in either order, and that a rank still connects.  It has no
bindings and no device, and the plugin must say so.
"""

from __future__ import annotations

import subprocess
import sys

import torch

ORDERS = (
    "import intel_extension_for_pytorch, commlayer_oneccl",
    "import commlayer_oneccl, intel_extension_for_pytorch",
)
CONNECT = """
import os, commlayer
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
commlayer.connect({"backend": "gloo"}).close()
"""


def main() -> int:
    for imports in ORDERS:
        fresh(imports + CONNECT)
    import commlayer_oneccl
    import intel_extension_for_pytorch as extension

    backend = commlayer_oneccl.commlayer_backend()
    viability = backend.viability()
    assert not viability.ok, viability
    assert "oneccl_bindings_for_pytorch is missing" in viability.reason, viability
    assert "commlayer-oneccl[bindings]" in viability.install, viability
    print(
        f"torch {torch.__version__}, intel-extension-for-pytorch {extension.__version__}: "
        f"loaded with the plugin in either order; {viability.reason}"
    )
    return 0


def fresh(program: str) -> None:
    """Run `program` in an interpreter of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, f"{program}\n{ended.stdout}{ended.stderr}"


if __name__ == "__main__":
    sys.exit(main())
