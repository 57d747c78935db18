# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
"""gdn: golden cases, each path as a chain, and no drift over many steps."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _load import GOLDEN, load
from _oracle import generator, randint, random_parents

gdn = load("gdn")

CASES = np.load(GOLDEN / "gdn_tree.npz")
NUM_CASES = 6


class Case:
    """One golden case as tensors; states in upstream's order."""

    def __init__(self, index: int) -> None:
        def get(name):
            return torch.from_numpy(CASES[f"{index}_{name}"])

        self.dims = get("dims").tolist()
        self.parents, self.path = get("parents").long(), get("path").long()
        self.x, self.history = get("x"), get("conv_hist")
        self.weight, self.bias = get("conv_weight"), get("conv_bias")
        self.gates = gdn.gates(get("a"), get("b"), get("A_log"), get("dt_bias"))
        self.state = get("S0").mT.contiguous()
        self.out = get("out")
        self.new_state = get("state_after_path").mT
        self.new_history = get("conv_state_after_path")

    def heads(self):
        mixed = gdn.tree_conv(
            self.x, self.history, self.weight, self.bias, self.parents
        )
        return gdn.split_heads(mixed, *self.dims)


@pytest.mark.parametrize("index", range(NUM_CASES))
def test_golden(index):
    case = Case(index)
    q, k, v = case.heads()
    out = gdn.tree_delta_rule(q, k, v, case.gates, case.state, case.parents)
    torch.testing.assert_close(out, case.out, rtol=1e-4, atol=1e-4)
    state = gdn.commit_path(k, v, case.gates, case.state, case.path)
    torch.testing.assert_close(state, case.new_state, rtol=1e-4, atol=1e-4)
    history = gdn.commit_history(case.x, case.history, case.path)
    torch.testing.assert_close(history, case.new_history, rtol=0, atol=0)


def sequential(x, a, b, p, state, history):
    """One row after another, float64, written out. Returns outputs and both states."""
    heads, value_heads, dk, dv = p["dims"]
    state, out = state.double().clone(), []
    window = [row.double() for row in history]
    for row in range(len(x)):
        window.append(x[row].double())
        taps = torch.stack(window[-4:])
        mixed = F.silu((taps.T * p["weight"].double()).sum(1) + p["bias"].double())
        q, k, v = gdn.split_heads(mixed[None], heads, value_heads, dk, dv)
        step = F.softplus(a[row].double() + p["dt_bias"].double())
        decay = torch.exp(-p["a_log"].double().exp() * step)
        beta = torch.sigmoid(b[row].double())
        result = []
        for head in range(value_heads):
            other = head // (value_heads // heads)
            key = k[0, other] / torch.sqrt(k[0, other].square().sum() + 1e-6)
            query = q[0, other] / torch.sqrt(q[0, other].square().sum() + 1e-6)
            state[head] *= decay[head]
            write = beta[head] * (v[0, head] - state[head] @ key)
            state[head] += torch.outer(write, key)
            result.append(state[head] @ query * dk**-0.5)
        out.append(torch.stack(result))
    return torch.stack(out), state, torch.stack(window[-3:])


def parameters(gen, dims):
    heads, value_heads, dk, dv = dims
    channels = 2 * heads * dk + value_heads * dv

    def rand(*shape):
        return torch.randn(*shape, generator=gen)

    return {
        "dims": dims,
        "channels": channels,
        "weight": rand(channels, 4) * 0.5,
        "bias": rand(channels) * 0.1,
        "a_log": rand(value_heads),
        "dt_bias": rand(value_heads),
    }


def inputs(gen, rows, p):
    value_heads = p["dims"][1]
    x = torch.randn(rows, p["channels"], generator=gen)
    a, b = torch.randn(2, rows, value_heads, generator=gen)
    return x, a, b


def tree_step(x, a, b, p, state, history, parents):
    mixed = gdn.tree_conv(x, history, p["weight"], p["bias"], parents)
    q, k, v = gdn.split_heads(mixed, *p["dims"])
    gate = gdn.gates(a, b, p["a_log"], p["dt_bias"])
    return gdn.tree_delta_rule(q, k, v, gate, state, parents), k, v, gate


def path_to(row, parents):
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return torch.tensor(path[::-1])


@pytest.mark.parametrize("dims", [(1, 1, 16, 16), (2, 6, 16, 24), (2, 4, 32, 8)])
def test_every_row_is_the_end_of_its_path(dims):
    gen = generator(3)
    p = parameters(gen, dims)
    state = torch.randn(dims[1], dims[3], dims[2], generator=gen)
    history = torch.randn(3, p["channels"], generator=gen)
    parents = torch.tensor(random_parents(gen, 23))
    x, a, b = inputs(gen, 24, p)
    out, *_ = tree_step(x, a, b, p, state, history, parents)
    for row in range(24):
        path = path_to(row, parents)
        want, _, _ = sequential(x[path], a[path], b[path], p, state, history)
        torch.testing.assert_close(out[row].double(), want[-1], rtol=1e-4, atol=1e-5)


def test_window_rows():
    parents = torch.tensor([-1, 0, 0, 2, 3])
    assert gdn.window_rows(parents, 4).tolist() == [
        [-3, -2, -1, 0],
        [-2, -1, 0, 1],
        [-2, -1, 0, 2],
        [-1, 0, 2, 3],
        [0, 2, 3, 4],
    ]


def test_decay_beside_the_path_does_not_overflow():
    """A sibling's subtree can have decayed far more; its difference is positive."""
    gen = generator(4)
    dims = (1, 1, 8, 8)
    p = parameters(gen, dims) | {"a_log": torch.tensor([5.0])}
    x, a, b = inputs(gen, 3, p)
    a[1] = 50.0  # row 1 forgets all; row 2 is its sibling
    parents = torch.tensor([-1, 0, 0])
    state = torch.randn(1, 8, 8, generator=gen)
    out, *_ = tree_step(x, a, b, p, state, torch.zeros(3, p["channels"]), parents)
    assert torch.isfinite(out).all()


def test_no_drift_over_200_steps():
    """Random trees and acceptances against one float64 run over the emitted rows."""
    gen = generator(5)
    dims = (2, 4, 16, 16)
    p = parameters(gen, dims)
    state = torch.zeros(4, 16, 16)
    history = torch.zeros(3, p["channels"])
    exact_state, exact_history = state.double(), history.double()
    for _ in range(200):
        rows = randint(gen, 1, 17)
        parents = torch.tensor(random_parents(gen, rows - 1))
        x, a, b = inputs(gen, rows, p)
        _, k, v, gate = tree_step(x, a, b, p, state, history, parents)
        path = path_to(randint(gen, 0, rows - 1), parents)
        _, exact_state, exact_history = sequential(
            x[path], a[path], b[path], p, exact_state, exact_history
        )
        state = gdn.commit_path(k, v, gate, state, path)
        history = gdn.commit_history(x, history, path)
        assert (state - exact_state).abs().max() < 1e-3
        torch.testing.assert_close(history.double(), exact_history, rtol=0, atol=0)


def test_unknown_activation():
    x = torch.zeros(1, 4)
    with pytest.raises(ValueError, match="activation='gelu'"):
        gdn.tree_conv(
            x, torch.zeros(3, 4), torch.zeros(4, 4), None, torch.tensor([-1]), "gelu"
        )
