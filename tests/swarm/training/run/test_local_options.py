from __future__ import annotations

from typing import Any

import pytest
from swarm.training.inner.one_device import LocalOptions
from swarm_protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ()}, "0 devices to train on"),
        ({"devices": ("cpu",) * 65}, "65 devices"),
        ({"devices": ("gpu:0",)}, "'gpu:0' is no device"),
        ({"devices": (3.5,)}, "3.5 is no device"),
        ({"devices": ("cuda:99",)}, "there is no device cuda:99"),
        ({"devices": ("cpu", "meta")}, "devices of several kinds: cpu, meta"),
        ({"devices": ("meta:0", "meta:0")}, "a device is named twice"),
        ({"micro_batch_windows": -1}, "micro_batch_windows = -1"),
        ({"micro_batch_windows": 1.5}, "micro_batch_windows = 1.5"),
        ({"micro_batch_windows": True}, "micro_batch_windows = True"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LocalOptions(**options)
    assert caught.value.remedy


def test_options_one_cpu_may_be_several_devices() -> None:
    assert LocalOptions(devices=("cpu", "cpu")).devices == ("cpu", "cpu")
