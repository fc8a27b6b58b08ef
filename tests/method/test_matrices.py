"""The draws: orthogonal, Haar, norm-matched, and the same bits everywhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from oelm.errors import MethodError
from oelm.method.matrices import draw, gaussian, orthonormal


WHO = {"seed": 0, "stack": "main", "layer": 0, "role": "q"}


def sha(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def signed_qr(block: np.ndarray) -> np.ndarray:
    """LAPACK's QR of the rows, with R's diagonal positive: the reference."""
    q, r = np.linalg.qr(block.T)
    return (q * np.sign(np.diag(r))).T


@pytest.mark.parametrize(
    ("heads", "head_dim", "width"), [(4, 8, 32), (1, 16, 16), (3, 5, 17), (2, 1, 3), (12, 64, 768)]
)
def test_heads_are_orthonormal_and_are_the_qr_of_their_gaussian(heads: int, head_dim: int, width: int) -> None:
    drawn = draw("orthogonal", heads, head_dim, width, **WHO)
    assert np.abs(drawn @ drawn.transpose(0, 2, 1) - np.eye(head_dim)).max() < 1e-13
    source = draw("gaussian", heads, head_dim, width, std=1.0, **WHO)
    for block, found in zip(source, drawn, strict=True):
        assert np.abs(signed_qr(block) - found).max() < 1e-9


def test_whole_matrix_wide_and_tall() -> None:
    wide = draw("orthogonal", 4, 8, 40, scope="matrix", **WHO).reshape(32, 40)
    assert np.abs(wide @ wide.T - np.eye(32)).max() < 1e-13
    tall = draw("orthogonal", 4, 16, 32, scope="matrix", **WHO).reshape(64, 32)
    assert np.abs(tall.T @ tall - 2 * np.eye(32)).max() < 1e-13  # entries of variance 1 / width, as in every draw
    heads = draw("orthogonal", 4, 8, 40, **WHO).reshape(32, 40)
    assert np.abs(heads @ heads.T - np.eye(32)).max() > 0.1  # heads alone are not orthogonal to each other


@pytest.mark.parametrize("init", ["orthogonal", "gaussian"])
@pytest.mark.parametrize("gain", [0.5, 1.0, 3.0])
def test_norm_is_matched(init: str, gain: float) -> None:
    values = draw(init, 8, 32, 256, gain=gain, **WHO)
    assert values.std() == pytest.approx(gain / 16, rel=0.02)


def test_given_std() -> None:
    assert draw("gaussian", 8, 32, 256, std=0.02, **WHO).std() == pytest.approx(0.02, rel=0.02)


def test_gaussian_is_standard_normal() -> None:
    values = gaussian(200_001, 11, "main", 2, "k")
    assert len(values) == 200_001
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert abs(stats.kurtosis(values)) < 0.05
    pairs = values[:200_000].reshape(-1, 2)
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.01  # the polar method makes them in pairs
    assert np.abs(values).max() > 3.9  # tails are there


def test_haar() -> None:
    """Entries, traces and determinants of many small draws have the moments of Haar measure on O(n)."""
    n, count = 3, 4000
    many = np.concatenate(
        [draw("orthogonal", 40, n, n, seed=i, stack="main", layer=0, role="q") for i in range(count // 40)]
    )
    # for Haar on O(n) one entry squared is Beta(1/2, (n-1)/2), the trace has mean 0 and variance 1, det is a fair coin
    assert stats.kstest(many[:, 0, 0] ** 2, stats.beta(0.5, (n - 1) / 2).cdf).pvalue > 1e-3
    assert stats.kstest(many[:, 2, 1] ** 2, stats.beta(0.5, (n - 1) / 2).cdf).pvalue > 1e-3
    traces = np.trace(many, axis1=1, axis2=2)
    assert abs(traces.mean()) < 4 / np.sqrt(count)
    assert traces.var() == pytest.approx(1.0, abs=0.1)
    assert abs(np.mean(np.linalg.det(many) > 0) - 0.5) < 2.5 / np.sqrt(count)
    # invariance: turned by a fixed rotation, entries follow the same law (an unfixed sign of R would fail here)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(n, n)))[0]
    assert stats.ks_2samp((many @ turn)[:, 0, 0], many[:, 0, 0]).pvalue > 1e-3


def test_every_coordinate_of_the_name_matters() -> None:
    others = [
        {"seed": 1},
        {"stack": "decoder"},
        {"layer": 1},
        {"role": "k"},
    ]
    shas = {sha(draw("orthogonal", 2, 4, 8, **(WHO | other))) for other in [{}, *others]}
    assert len(shas) == 5
    assert sha(draw("orthogonal", 2, 4, 8, **WHO)) in shas  # and nothing else does


def test_golden_bits() -> None:
    """These bits are the promise of compact checkpoints: a change here makes every saved one unreadable."""
    assert sha(draw("orthogonal", 2, 4, 9, **WHO)) == GOLDEN["orthogonal"]
    assert sha(draw("gaussian", 2, 4, 9, **WHO)) == GOLDEN["gaussian"]
    assert sha(draw("orthogonal", 2, 4, 9, scope="matrix", **WHO)) == GOLDEN["matrix"]


GOLDEN = {"orthogonal": "b7fcb1c2656f3b05", "gaussian": "a5854a04f4098a3e", "matrix": "23a31d8f37fecbe0"}

SCRIPT = """
import sys, hashlib
threads = int(sys.argv[1])
import torch
torch.set_num_threads(threads)
import numpy as np
from oelm.method.matrices import draw
order = range(2) if sys.argv[2] == "up" else reversed(range(2))
found = {}
for layer in order:
    for role in ("q", "k"):
        for scope in ("head", "matrix"):
            w = draw("orthogonal", 4, 16, 192, seed=9, stack="main", layer=layer, role=role, scope=scope)
            found[f"{layer}{role}{scope}"] = hashlib.sha256(w.tobytes()).hexdigest()
print(sorted(found.items()))
"""


def test_bits_do_not_depend_on_threads_or_order() -> None:
    outputs = set()
    for threads, order in (("1", "up"), ("2", "down")):
        environment = os.environ | dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads
        )
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, threads, order], env=environment, capture_output=True, text=True, check=True
        )
        outputs.add(run.stdout)
    assert len(outputs) == 1


def test_global_generators_do_not_move() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    before, state = torch.get_rng_state(), np.random.get_state()[1].copy()
    draw("orthogonal", 2, 4, 8, **WHO)
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(state, np.random.get_state()[1])


def test_orthogonalize_is_the_signed_qr_of_what_is_there() -> None:
    generator = np.random.default_rng(3)
    present = generator.normal(size=(3, 6, 20)) * np.logspace(0, -6, 6)[None, :, None]  # badly scaled rows
    found = orthonormal(present)
    assert np.abs(found @ found.transpose(0, 2, 1) - np.eye(6)).max() < 1e-14
    for block, q in zip(present, found, strict=True):
        assert np.abs(signed_qr(block) - q).max() < 1e-8
        assert np.diag(block @ q.T).min() > 0


def test_nearly_dependent_rows_still_come_out_orthonormal() -> None:
    generator = np.random.default_rng(4)
    present = generator.normal(size=(1, 4, 30))
    present[0, 3] = present[0, :3].sum(0) + 1e-6 * present[0, 3]
    found = orthonormal(present)
    assert np.abs(found @ found.transpose(0, 2, 1) - np.eye(4)).max() < 1e-13


@pytest.mark.parametrize("fault", ["zero", "copy", "nan", "inf"])
def test_what_has_no_directions_is_refused(fault: str) -> None:
    present = np.random.default_rng(5).normal(size=(2, 3, 8))
    present[1, 2] = {"zero": 0.0, "copy": present[1, 0], "nan": np.nan, "inf": np.inf}[fault]
    with np.errstate(all="ignore"), pytest.raises(MethodError, match="row 2 of block 1"):
        orthonormal(present)


def test_a_head_wider_than_its_input_is_refused() -> None:
    with pytest.raises(MethodError, match="no orthonormal rows"):
        draw("orthogonal", 2, 16, 8, **WHO)
    assert draw("gaussian", 2, 16, 8, **WHO).shape == (2, 16, 8)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["head", "matrix"]),
)
def test_any_shape_that_fits(heads: int, head_dim: int, width: int, seed: int, scope: str) -> None:
    who = WHO | {"seed": seed}
    if scope == "head" and head_dim > width:
        with pytest.raises(MethodError):
            draw("orthogonal", heads, head_dim, width, scope=scope, **who)
        return
    w = draw("orthogonal", heads, head_dim, width, scope=scope, **who)
    assert w.shape == (heads, head_dim, width)
    if scope == "head":
        assert np.abs(w @ w.transpose(0, 2, 1) - np.eye(head_dim)).max() < 1e-12
    else:
        whole = w.reshape(-1, width)
        gram = whole @ whole.T if len(whole) <= width else whole.T @ whole * width / len(whole)
        assert np.abs(gram - np.eye(len(gram))).max() < 1e-12
    assert sha(w) == sha(draw("orthogonal", heads, head_dim, width, scope=scope, **who))
