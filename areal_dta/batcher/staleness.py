"""Admission of new groups and choice of the groups of a batch under the staleness bound eta.

Staleness of a token at step k is ``abs(k - number)``, number being the policy version that produced it; step k trains
version k.

*Admission* is AReaL's formula (``areal/infra/staleness_manager.py``, `get_capacity`): running + accepted <= (eta +
version + 1) * batch, and running <= max_concurrent. With ``accepted = consumed + unconsumed`` it reads: in flight +
accepted but not consumed <= (eta + version + 1 - batches consumed) * batch. Here a whole group is admitted at its first
sample, counts ``group_size`` episodes until consumed or dropped, and the version after a resume is the checkpoint's
with its batches counted as consumed (AReaL 1.0.4 loses the bound there).

*Consumption.* A group admitted at version v has the deadline v + eta, the last step that may train it. The admission
formula alone keeps all deadlines only if groups are consumed in the order of admission; a straggler that is overtaken
can miss its own. So:

- ``wait``: a batch takes the ready groups with the earliest deadlines, once the groups left behind can all still meet
  theirs (for every step t: those due by t fit into the batches up to t). Admission order always satisfies this, so it
  never blocks on anything but unfinished groups, whose time is bounded by ``batcher.group_timeout_s``.
- ``drop``: never waits; an episode with a token staler than eta is dropped when it would be used.
- ``mask``: never waits; tokens staler than eta keep their place as context and lose their loss mask.
- ``keep``: no bound, oldest first.

Under ``wait`` a token may still be too stale (a server that served older weights, a resume): it is then dropped as
under ``drop``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from areal_dta.batcher.leases import Group, GroupState

__all__ = ["Choice", "admissible_groups", "choose", "fresh_mask"]


@dataclass(frozen=True)
class Choice:
    """The groups of the next batch, or why there are none yet."""

    groups: tuple[Group, ...] = ()
    why: str = ""


def admissible_groups(
    *, eta: int, version: int, consumed_batches: int, batch_groups: int, outstanding: int, total_steps: int | None
) -> int:
    """How many new groups may start now; never more than the run's remaining steps can use."""
    horizon = eta + version + 1
    if total_steps is not None:
        horizon = min(horizon, total_steps)
    return max(0, (horizon - consumed_batches) * batch_groups - outstanding)


def choose(groups: Iterable[Group], step: int, *, eta: int, batch_groups: int, version: int, policy: str) -> Choice:
    """The batch of `step` among `groups` (open and ready ones); stale episodes must have been dropped already."""
    pool = [(g.version_min(version) + eta, g.group_id, g) for g in groups if g.state is not GroupState.BATCHED]
    pool.sort(key=lambda entry: entry[:2])
    bounded = policy in ("wait", "drop")
    usable = [e for e in pool if e[2].state is GroupState.READY and not (bounded and e[2].version_max() - eta > step)]
    if len(usable) < batch_groups:
        return Choice(why=f"{len(usable)} of {batch_groups} groups are complete")
    chosen = usable[:batch_groups]
    if policy == "wait":
        taken = {group_id for _, group_id, _ in chosen}
        late = _endangered([e for e in pool if e[1] not in taken], chosen[-1][0], step, batch_groups)
        if late:
            names = ", ".join(map(str, late[:8]))
            return Choice(why=f"waiting for stragglers of groups {names}: they would be staler than eta={eta} later")
    return Choice(groups=tuple(g for _, _, g in chosen))


def _endangered(left: Sequence[tuple[int, int, Group]], last_due: int, step: int, batch_groups: int) -> list[int]:
    """Unfinished groups to wait for, because those due by some step t outnumber the batches after `step` up to t.

    Waiting only helps when a chosen group is due later than t and could make room (`last_due` is the latest due).
    """
    for index, (due, _, _) in enumerate(left):  # sorted by due step
        if index + 1 > max(0, due - step) * batch_groups and last_due > due:
            unfinished = [i for d, i, g in left if d <= due and g.state is GroupState.OPEN]
            if unfinished:
                return unfinished
    return []


def fresh_mask(versions_T: np.ndarray, step: int, eta: int) -> np.ndarray:
    """True where a token may be trained at `step`; prompt tokens (version -1) count as fresh."""
    return (np.abs(step - versions_T) <= eta) | (versions_T < 0)
