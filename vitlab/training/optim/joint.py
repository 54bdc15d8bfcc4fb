"""Optimizers of several models that step together."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from vitlab.training.optim.contract import Composite, Group, eager


class Joint:
    """Optimizers of several models that step together, with one call for all parameters of equal settings.

    Torch's elementwise optimizers, and those with the attribute ``joint_safe``, are joined: their result for a
    parameter does not depend on the others, bitwise, and they count no steps per group.  Each optimizer keeps its own
    state.  Other optimizers step one by one.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        parts = [part for one in optimizers for part in (one.parts if isinstance(one, Composite) else [one])]
        self._separate = [part for part in parts if not _is_safe(part)]
        self._grouped: list[tuple[torch.optim.Optimizer, list[torch.optim.Optimizer]]] = []
        for kind in dict.fromkeys(type(part) for part in parts if _is_safe(part)):
            members = [part for part in parts if type(part) is kind]
            combined = copy.copy(members[0])
            states = {p: one.state[p] for one in members for group in one.param_groups for p in group["params"]}
            combined.state = defaultdict(dict, states)
            self._grouped.append((combined, members))

    def step(self) -> None:
        """Take a step of every optimizer."""
        for optimizer in self._separate:
            optimizer.step()
        for combined, members in self._grouped:
            combined.param_groups = _merged(group for member in members for group in member.param_groups)
            combined.step()


def _is_safe(part: torch.optim.Optimizer) -> bool:
    elementwise = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
    return type(part) in (*elementwise, *map(eager, elementwise)) or getattr(part, "joint_safe", False)


def _merged(groups: Iterable[Group]) -> list[Group]:
    """Merge the groups that differ in nothing but their parameters."""
    merged: list[tuple[Group, list[nn.Parameter]]] = []
    for group in groups:
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for equal, params in merged:
            if equal == settings:
                params.extend(group["params"])
                break
        else:
            merged.append((settings, list(group["params"])))
    return [{**settings, "params": params} for settings, params in merged]
