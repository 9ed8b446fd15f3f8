"""Helm's own library, in a process of its own.

The library is written in Go. Go's runtime handles signals of the process that loads it, also of threads that it did not
start: with it, a process of tests that writes to a closed socket was killed by SIGPIPE's handler.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

__all__ = ["HelmError", "Values", "close", "lint", "render", "validate"]

Values = dict[str, Any]  # Any: of YAML
_CHART = str(Path(__file__).parents[2] / "deploy" / "helm" / "tailrace")


class HelmError(Exception):
    """Helm refuses the values of a chart."""


def render(values: Values, name: str, namespace: str) -> dict[str, str]:
    """Return the text of each file of the chart. Raises: HelmError."""
    return _process().submit(_render, values, name, namespace).result()


def validate(values: Values) -> None:
    """Check values against the chart's schema. Raises: HelmError."""
    _process().submit(_validate, values).result()


def lint() -> Values:
    """Return what Helm finds wrong with the chart: `errors` and `messages`."""
    return _process().submit(_lint).result()


def close() -> None:
    """End the process."""
    _process().shutdown()
    _process.cache_clear()


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


@contextlib.contextmanager
def _chart() -> Iterator[Any]:  # Any: the library is untyped
    import helm_python

    with helm_python.Chart.load(_CHART) as chart:
        try:
            yield chart
        except helm_python.HelmError as error:
            raise HelmError(str(error)) from None


def _render(values: Values, name: str, namespace: str) -> dict[str, str]:
    with _chart() as chart:
        return dict(chart.render(values, name=name, namespace=namespace))


def _validate(values: Values) -> None:
    with _chart() as chart:
        chart.validate_schema(values)


def _lint() -> Values:
    import helm_python

    return dict(helm_python.lint(_CHART))
