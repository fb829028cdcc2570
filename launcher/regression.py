"""Bayesian linear regression on a few observations, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

INTERACTION = 0.03
"""The standard deviation of what the inputs do to each other, which no weight tells."""


@dataclass(slots=True)
class Regression:
    """With a standard normal prior on every weight, in its kernel form."""

    inputs: list[list[float]] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=list)
    factor: list[list[float]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @property
    def seen(self) -> int:
        """How many observations it has."""
        return len(self.targets)

    def add(self, vector: Sequence[float], target: float, noise: float) -> None:
        """One more observation, with the standard deviation of its noise."""
        self.inputs.append(list(vector))
        self.targets.append(target)
        self.noises.append(noise)
        size = len(self.inputs)
        kernel = [
            [
                _dot(self.inputs[i], self.inputs[j])
                + ((self.noises[i] ** 2 + INTERACTION**2) if i == j else 0.0)
                for j in range(size)
            ]
            for i in range(size)
        ]
        self.factor = _cholesky(kernel)
        self.weights = _back(self.factor, _forward(self.factor, self.targets))

    def at(self, vector: Sequence[float]) -> tuple[float, float]:
        """Mean and standard deviation at a point, what levers do to each other included."""
        cross = [_dot(vector, one) for one in self.inputs]
        mean = _dot(cross, self.weights)
        solved = _forward(self.factor, cross)
        variance = _dot(vector, vector) - _dot(solved, solved) + INTERACTION**2
        return mean, math.sqrt(max(variance, INTERACTION**2))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def _cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    size = len(matrix)
    factor = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - _dot(factor[i][:j], factor[j][:j])
            factor[i][j] = math.sqrt(max(rest, 1e-12)) if i == j else rest / factor[j][j]
    return factor


def _forward(factor: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    solved: list[float] = []
    for i, value in enumerate(right):
        solved.append((value - _dot(factor[i][:i], solved)) / factor[i][i])
    return solved


def _back(factor: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    size = len(right)
    solved = [0.0] * size
    for i in reversed(range(size)):
        rest = math.fsum(factor[k][i] * solved[k] for k in range(i + 1, size))
        solved[i] = (right[i] - rest) / factor[i][i]
    return solved
