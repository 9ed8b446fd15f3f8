from pathlib import Path

from tailrace import serve
from tailrace.serve.folders import FolderApp, TargetError


def load_folder(folder: Path, *, concurrency: int, queue_s: float | None) -> FolderApp:
    text = (folder / "parrot.txt").read_text("utf-8")
    if not text:
        raise TargetError("parrot.txt is empty.")

    async def say(request: object) -> str:
        return text

    deployment = serve.deployment(name=folder.name, max_ongoing_requests=concurrency)(say)
    return FolderApp(deployment.bind(), ["The parrot knows one text."])
