"""Explaining why nothing moves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from commlayer_testkit.sim.failure import Failure, FailureKind
from commlayer_testkit.sim.world import Task

if TYPE_CHECKING:
    from commlayer_testkit.sim.operation import Operation
    from commlayer_testkit.sim.world import World


def deadlock(world: World, stuck: Sequence[Any]) -> Failure:
    """The failure of a world in which `stuck` will never run again."""
    cycle = find_cycle(stuck)
    kind = FailureKind.LOST_MESSAGE if world.lost and not cycle else FailureKind.DEADLOCK
    who = ", ".join(_text(node) for node in stuck)
    what = world.lost[0] if kind is FailureKind.LOST_MESSAGE else f"{who} wait for ever"
    inside = {id(node) for node in cycle}
    return Failure(kind, what, tuple(_text(node) for node in cycle), tuple(graph(stuck, inside)))


def watchdog(world: World, operation: Operation) -> Failure:
    """The failure of an operation that stayed on a device too long."""
    tasks = [a for a in world.actors if isinstance(a, Task) and not a.daemon]
    if find_cycle([*tasks, operation]):
        return deadlock(world, tasks or [operation])
    what = f"after {world.now:g} s the device watchdog ended {operation.describe()}"
    return Failure(FailureKind.WATCHDOG, what, (), tuple(graph([operation])))


def find_cycle(roots: Sequence[Any]) -> list[Any]:
    """A cycle of the wait-for graph that is reachable from `roots`, or nothing."""
    done: set[int] = set()
    for root in roots:
        path: list[Any] = []
        on_path: dict[int, int] = {}
        stack: list[tuple[Any, int]] = [(root, 0)]
        while stack:
            node, depth = stack.pop()
            for gone in path[depth:]:
                del on_path[id(gone)]
                done.add(id(gone))
            del path[depth:]
            if id(node) in on_path:
                return path[on_path[id(node)] :]
            if id(node) in done:
                continue
            on_path[id(node)] = depth
            path.append(node)
            stack += [(target, depth + 1) for target in reversed(node.waits_for())]
        done.update(id(node) for node in path)
    return []


def graph(roots: Sequence[Any], known: Collection[int] = ()) -> list[str]:
    """The wait-for graph as lines, but for edges between the nodes whose ids are `known`."""
    lines: list[str] = []
    seen: set[int] = set()
    queue = list(roots)
    while queue:
        node = queue.pop(0)
        if id(node) in seen:
            continue
        seen.add(id(node))
        targets = node.waits_for()
        reason = node.reason if isinstance(node, Task) and node.reason else "waits for"
        lines += [
            f"{_text(node)} {reason} {_text(target)}"
            for target in targets
            if id(node) not in known or id(target) not in known
        ]
        if not targets and isinstance(node, Task):
            lines.append(f"{_text(node)} {reason}")
        queue += targets
    return lines


def _text(node: Any) -> str:
    return str(node.describe())
