"""What the author of an app is told to install."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tailrace.serve.failures import failed, know_interpreter, know_packages


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    know_packages([])
    know_interpreter("")


def _told(module: str) -> str:
    return failed(ModuleNotFoundError(f"No module named {module!r}", name=module), "importing app:app").message


def test_ray_is_an_import_to_change() -> None:
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
    know_packages(listed)
    assert _told(module).endswith(f"Try: pip install {install}")


def test_it_is_installed_where_the_app_runs() -> None:
    know_interpreter("/srv/old env/bin/python")
    assert _told("torch").endswith("Try: '/srv/old env/bin/python' -m pip install torch")
