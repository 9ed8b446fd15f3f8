"""Network file systems are found in the list of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.system.file_systems import network_file_system

_MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:40 / /home rw,relatime - nfs4 server:/home rw,vers=4.2
41 40 0:41 / /home/local rw - ext4 /dev/sdb1 rw
42 22 0:42 / /mnt/my\\040share rw - cifs //server/share rw
43 22 0:43 / /data rw - nfs server:/data rw
44 43 0:44 / /data rw - tmpfs tmpfs rw
broken line
45 22
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x.sqlite", ""),
        ("/home/me/.local/share/tailrace/records.sqlite", "nfs4"),
        ("/homes/x.sqlite", ""),
        ("/home/local/x.sqlite", ""),
        ("/mnt/my share/x.sqlite", "cifs"),
        ("/data/x.sqlite", ""),
    ],
)
def test_the_nearest_mount_counts(path: str, kind: str) -> None:
    assert network_file_system(Path(path), _MOUNTS) == kind
