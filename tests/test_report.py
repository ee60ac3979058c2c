"""The report of a model as a dictionary: what TensorBoard's and wandb's writers of scalars take."""

from __future__ import annotations

import json

import torch
from torch import nn

import zcompile


def test_a_report_is_flat_numbers() -> None:
    model = zcompile.compile(nn.Linear(7, 5), backend="eager")
    optimizer = zcompile.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    scalars = model.report(optimizer).to_dict()
    assert {type(name) for name in scalars} == {str} and {type(value) for value in scalars.values()} <= {int, float}
    assert json.loads(json.dumps(scalars)) == scalars
    assert scalars["parameter_bytes_total"] == 4 * 40 and scalars["optimizer_bytes"] == 8 * 40 + 2 * 4
