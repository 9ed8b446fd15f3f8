from __future__ import annotations

import pickle
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from tailrace import serve
from tailrace_outer.serve.deployment import bound, nodes


class _Body:
    """What it is for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.given = (args, kwargs)


def _function(request: object) -> str:
    return "x"


def test_bare_and_with_options() -> None:
    bare = serve.deployment(_Body)
    assert (bare.name, bare.num_replicas, bare.max_ongoing_requests, bare.max_queued_requests) == (
        "_Body",
        1,
        100,
        1000,
    )
    assert bare.func_or_class is _Body
    assert bare.__doc__ == "What it is for."
    given = serve.deployment(name="other", num_replicas=2, user_config={"a": 1})(_function)
    assert (given.name, given.num_replicas, given.user_config) == ("other", 2, {"a": 1})


def test_options_make_a_copy() -> None:
    first = serve.deployment(num_replicas=2, ray_actor_options={"num_cpus": 1})(_Body)
    second = first.options(name="second", max_ongoing_requests=7, max_surge_percent=10)
    assert (first.name, first.max_ongoing_requests) == ("_Body", 100)
    assert (second.name, second.num_replicas, second.max_ongoing_requests) == ("second", 2, 7)
    assert second.foreign == {"ray_actor_options": {"num_cpus": 1}, "max_surge_percent": 10}
    assert first.options(_function).func_or_class is _function
    with pytest.raises(TypeError, match="no option replicas"):
        first.options(replicas=1)


@pytest.mark.parametrize("body", [5, "text", _Body(), serve.deployment(_Body)])
def test_objects_that_cannot_be_deployments(body: Any) -> None:
    with pytest.raises(TypeError):
        serve.deployment(body)


def test_deployments_are_not_called() -> None:
    with pytest.raises(RuntimeError, match=r"_Body\.bind"):
        serve.deployment(_Body)()


def test_an_app_is_its_children_first_each_once() -> None:
    word = serve.deployment(name="word")(_Body)
    shared, second = word.bind(1), word.bind(shared=serve.deployment(name="deep")(_Body).bind())
    app = serve.deployment(name="top")(_Body).bind(
        shared, [shared, (second,)], by_name={"key": {"deeper": word.bind(3)}}
    )
    found = nodes(app)
    assert list(found) == ["word", "deep", "word_1", "word_2", "top"]
    assert found["word"] is shared
    assert found["word_1"] is second
    args, kwargs = bound(app, lambda name: f"<{name}>")(app)
    assert args == ("<word>", ["<word>", ("<word_1>",)])
    assert kwargs == {"by_name": {"key": {"deeper": "<word_2>"}}}


def test_used_names_get_a_suffix() -> None:
    one, two, three = (serve.deployment(name=name)(_Body).bind() for name in ("a", "a_1", "a"))
    assert list(nodes(serve.deployment(name="top")(_Body).bind(one, two, three))) == ["a", "a_1", "a_2", "top"]


def test_other_containers_are_not_changed() -> None:
    given = {"set": {1, 2}, "list": [1, {"b": (2, 3)}]}
    app = serve.deployment(_Body).bind(given)
    ((found,), _) = bound(app, lambda name: name)(app)
    assert found == given
    assert found is not given


def test_apps_can_be_pickled() -> None:
    app = serve.deployment(_Body).bind(serve.deployment(name="child")(_Body).bind(1))
    assert list(nodes(pickle.loads(cloudpickle.dumps(app)))) == ["child", "_Body"]


def test_representations() -> None:
    deployment = serve.deployment(_Body)
    assert repr(deployment) == "Deployment(name='_Body')"
    assert repr(deployment.bind()) == "Application('_Body')"
