"""Optimizers of several models that step together."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        self._separate = [part for part in parts if not _is_safe(part)]
        self._grouped: list[tuple[torch.optim.Optimizer, list[torch.optim.Optimizer]]] = []
        self._adams: dict[torch.optim.Optimizer, _Adams] = {}  # by the combined optimizer
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
            if (adams := self._adams.get(combined)) is not None and adams.step():
                continue
            combined.param_groups = _merged(group for member in members for group in member.param_groups)
            combined.step()
            if combined not in self._adams and _Adams.is_possible(members):
                self._adams[combined] = _Adams(members)


class _Adams:
    """Steps of several Adam or AdamW optimizers, by torch's fused kernel alone.

    The method ``step`` of torch's optimizer calls the same kernel.  For 700 small parameters it takes eight times as
    long as the kernel, since it visits every parameter in Python and increments its counter by a call of its own; here
    the counters are views of one vector.
    """

    @staticmethod
    def is_possible(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Return True if all parameters have a state, and the kernel takes them all in one call."""
        if not all(type(one) in ADAMS for one in optimizers):
            return False
        groups = [group for one in optimizers for group in one.param_groups]
        states = [one.state.get(p, {}) for one in optimizers for group in one.param_groups for p in group["params"]]
        kinds = {(p.dtype, p.device) for group in groups for p in group["params"]}
        plain = all(group["fused"] and not (group["amsgrad"] or group["maximize"]) for group in groups)
        return plain and len(kinds) == 1 and all("exp_avg" in state for state in states)

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.kernel: Any = torch._fused_adamw_ if isinstance(optimizers[0], torch.optim.AdamW) else torch._fused_adam_
        params = [(one.state[p], p) for one in optimizers for group in one.param_groups for p in group["params"]]
        self.steps_P = torch.stack([state["step"] for state, _ in params])
        for (state, _), step in zip(params, self.steps_P.unbind(), strict=True):
            state["step"] = step
        self.groups = [
            (
                group,
                [
                    (p, one.state[p]["exp_avg"], one.state[p]["exp_avg_sq"], one.state[p]["step"])
                    for p in group["params"]
                ],
            )
            for one in optimizers
            for group in one.param_groups
        ]

    @torch.no_grad()
    def step(self) -> bool:
        """Take a step and return True, unless a parameter has no gradient."""
        rows: defaultdict[tuple[float, ...], list[tuple[Tensor, ...]]] = defaultdict(list)
        for group, tensors in self.groups:
            rows[group["lr"], *group["betas"], group["weight_decay"], group["eps"]] += tensors
        gradients = {settings: [row[0].grad for row in equal] for settings, equal in rows.items()}
        if any(gradient is None for each in gradients.values() for gradient in each):
            return False
        self.steps_P += 1
        for settings, equal in rows.items():
            lr, beta1, beta2, weight_decay, eps = settings
            params, averages, squares, steps = map(list, zip(*equal, strict=True))
            self.kernel(
                params,
                gradients[settings],
                averages,
                squares,
                [],
                steps,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )
        return True


def _is_safe(part: torch.optim.Optimizer) -> bool:
    return type(part) in (*ADAMS, *SGDS) or getattr(part, "joint_safe", False)


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
