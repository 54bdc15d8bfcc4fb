"""Optimizers of several models that step together."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.training.optim.contract import Composite, Group, eager

_ADAMS, _SGDS = (torch.optim.Adam, torch.optim.AdamW), (torch.optim.SGD,)
ADAMS, SGDS = (*_ADAMS, *map(eager, _ADAMS)), (*_SGDS, *map(eager, _SGDS))
"""Classes of elementwise optimizers; a derived class may compute another step."""


class Joint:
    """Optimizers of several models that step together, with one call for all parameters of equal settings.

    Torch's elementwise optimizers, and those with the attribute ``joint_safe``, are joined: their result for a
    parameter does not depend on the others, bitwise, and they count no steps per group.  Each optimizer keeps its own
    state, and loads none from then on.  Other optimizers step one by one.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        parts = [part for one in optimizers for part in (one.parts if isinstance(one, Composite) else [one])]
        joined: defaultdict[type, list[torch.optim.Optimizer]] = defaultdict(list)
        self._steps: list[torch.optim.Optimizer | _Joined] = []
        for part in parts:
            if type(part) in (*ADAMS, *SGDS) or getattr(part, "joint_safe", False):
                joined[type(part)].append(part)
            else:
                self._steps.append(part)
        self._steps += map(_Joined, joined.values())

    def step(self) -> None:
        """Take a step of every optimizer."""
        for one in self._steps:
            one.step()


class _Joined:
    """Optimizers of one class as one.

    Several Adam or AdamW optimizers step by torch's fused kernel alone.  The method ``step`` of torch's optimizer calls
    the same kernel; for 700 small parameters it takes eight times as long, since it visits every parameter in Python
    and increments its counter by a call of its own.  Here the counters are views of one vector.
    """

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self.groups = [group for member in members for group in member.param_groups]
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for member in members:
            self.state |= {p: member.state[p] for group in member.param_groups for p in group["params"]}
        # A shallow copy has the defaults and hooks of its class, and state and groups of all.
        self.combined = copy.copy(members[0])
        self.combined.state = self.state
        self.steps_P: Tensor | None = None  #: the counters of all parameters, for the kernel alone

    @torch.no_grad()
    def step(self) -> None:
        """Take a step of every optimizer."""
        merged: list[Group] = []  # groups that differ in nothing but their parameters, as one
        for group in self.groups:
            settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            equal = next((other for other in merged if {**other, "params": []} == {**settings, "params": []}), None)
            if equal is None:
                equal = {**settings, "params": []}
                merged.append(equal)
            equal["params"] += group["params"]
        # The kernel has no notion of a missing gradient, which torch's step leaves out.
        if self.steps_P is not None and all(p.grad is not None for p in self.state):
            self.steps_P += 1
            for group in merged:
                self._call_kernel(group)
            return
        self.combined.param_groups = merged
        self.combined.step()
        if self.steps_P is None and self._suits_kernel():
            self.steps_P = torch.stack([state["step"] for state in self.state.values()])
            for state, step in zip(self.state.values(), self.steps_P.unbind(), strict=True):
                state["step"] = step

    def _suits_kernel(self) -> bool:
        """Return True if all parameters have a state of Adam, and the kernel takes them all in one call."""
        return (
            type(self.combined) in ADAMS
            and all(group["fused"] and not (group["amsgrad"] or group["maximize"]) for group in self.groups)
            and len({(p.dtype, p.device) for p in self.state}) == 1
            and all("exp_avg" in state for state in self.state.values())
        )

    def _call_kernel(self, group: Group) -> None:
        kernel: Any = torch._fused_adamw_ if isinstance(self.combined, torch.optim.AdamW) else torch._fused_adam_
        states = [self.state[p] for p in group["params"]]
        beta1, beta2 = group["betas"]
        kernel(
            group["params"],
            [p.grad for p in group["params"]],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
