"""Which packages the author of an app is told to install."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tailrace_outer.serve import failures
from tailrace_outer.serve.failures import failed, set_requirements


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    set_requirements([])


def _told(module: str) -> str:
    return failed(ModuleNotFoundError(f"No module named {module!r}", name=module), "importing app:app").message


def test_importing_ray_is_refused_with_advice() -> None:
    for module in ("ray", "ray.serve"):
        assert 'Change "from ray import serve" to "from tailrace import serve"' in _told(module)


@pytest.mark.parametrize(
    ("module", "listed", "install"),
    [
        ("cv2", [], "opencv-python"),
        ("cv2.cuda", ["numpy", "opencv-python-headless==4.9.0.80"], "opencv-python-headless==4.9.0.80"),
        ("PIL", ["Pillow>=10"], "'Pillow>=10'"),
        ("sentence_transformers", ["Sentence.Transformers[onnx]~=2.7"], "'Sentence.Transformers[onnx]~=2.7'"),
        ("dateutil", ["python-dateutil==2.9"], "python-dateutil==2.9"),
        ("torch", ["torchvision==0.18"], "torch"),
        ("einops", ["git+https://example.org/einops"], "einops"),
    ],
)
def test_a_missing_module_is_named_as_the_app_lists_it(module: str, listed: list[str], install: str) -> None:
    set_requirements(listed)
    assert _told(module).endswith(f"Try: {sys.executable} -m pip install {install}")


def test_the_command_installs_into_the_apps_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/srv/old env/bin/python")
    assert _told("torch").endswith("Try: '/srv/old env/bin/python' -m pip install torch")


@pytest.mark.parametrize(("is_there", "wanted"), [(False, "transformers==4.4 torch"), (True, "transformers==4.4")])
def test_transformers_is_named_with_torch(is_there: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch, transformers can be imported but cannot run a model."""
    set_requirements(["transformers==4.4"])
    monkeypatch.setattr(failures, "find_spec", {"torch": is_there or None}.get)
    assert _told("transformers").endswith(f" -m pip install {wanted}")


def test_no_environment_but_that_of_ray_is_named_for_ray() -> None:
    """`--on ray` itself names the command. Two messages could name different commands."""
    assert "pip" not in _told("ray")
