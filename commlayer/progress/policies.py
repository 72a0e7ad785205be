"""What both kinds of policy share: facts they need, and the refusal when those are not declared."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from commlayer.errors import CommError, ErrorKind
from commlayer.semantics import OperationSemantics, Semantics


class Policy(Protocol):
    """A choice that is sound only under some facts.

    `requires` maps names of `OperationSemantics` fields to the values under
    which the policy is sound; facts it does not name do not matter to it.
    """

    @property
    def name(self) -> str:
        """What the configuration and refusals call it."""
        ...

    @property
    def requires(self) -> Mapping[str, Collection[Any]]:
        """Names of facts, each with the values under which the policy is sound."""
        ...


def check_sound(policy: Policy, semantics: Semantics, backend: str) -> None:
    """Raise `CommError` (CONFIG) naming the first fact that makes `policy` unsound."""
    for fact, allowed in policy.requires.items():
        if fact not in OperationSemantics.__struct_fields__:
            raise CommError(
                ErrorKind.CONFIG,
                f"policy {policy.name!r}",
                f"it requires something of {fact!r}, and there is no fact {fact!r}",
                f"Known: {', '.join(OperationSemantics.__struct_fields__)}",
            )
        declared = getattr(semantics.p2p, fact)
        if declared not in allowed:
            wanted = " or ".join(sorted(getattr(value, "name", str(value)) for value in allowed))
            raise CommError(
                ErrorKind.CONFIG,
                f"policy {policy.name!r} on backend {backend!r}",
                f"unsound: it needs p2p {fact} = {wanted}, and the backend declares "
                f"{getattr(declared, 'name', declared)}",
                "Choose another policy, or leave it to the default",
            )
