"""A disk that can be full: a small file system where one may be mounted, else a limit on the files of one process."""

import contextlib
import resource
import subprocess
from pathlib import Path

SIZE_BYTES = 4 << 20
CHUNK_BYTES = 64 << 10


class Disk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        options = ["-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "chaos", str(folder)]
        self.mounted = subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
        self._ballast = folder / "ballast"

    def fill(self, writer: int) -> None:
        """No byte is left for anybody; without a file system of its own, for the process `writer`."""
        if not self.mounted:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(writer, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            return
        for size in (CHUNK_BYTES, 1):
            with contextlib.suppress(OSError), open(self._ballast, "ab", buffering=0) as file:
                while file.write(bytes(size)):
                    pass

    def clear(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)
