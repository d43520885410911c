"""The manifest of a folder of results: what was asked for, by which code, which steps are done, and its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sp_bench import records
from sp_bench.errors import RequestError

NAME = "manifest.json"
SCHEMA_VERSION = 1


class Manifest:
    """The manifest of a folder, written whole after each change, so that a killed run can go on."""

    def __init__(self, folder: Path, options: Mapping[str, Any]) -> None:
        """Read the folder's manifest, or begin one. Raises RequestError if it belongs to another run."""
        self._folder, self._path = folder, folder / NAME
        made = {key: records.provenance()[key] for key in ("code_version", "git_commit", "git_dirty", "versions")}
        self._content: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION, "began": now(), **made, "machine": records.machine(),
            "options": dict(options), "steps": {}, "files": {},
        }  # fmt: skip
        if self._path.exists():
            self._content = self._resumed(self._content)
        self._write()

    def steps(self) -> dict[str, dict[str, Any]]:
        """The state of each step begun so far, by its name."""
        return self._content["steps"]

    def done(self, step: str) -> bool:
        """Whether a step has ended well."""
        return self.steps().get(step, {}).get("exit_code") == 0

    def begin(self, step: str, command: Sequence[str]) -> None:
        """Mark a step as under way."""
        self.steps()[step] = {"command": list(command), "began": now(), "ended": None, "exit_code": None}
        self._write()

    def end(self, step: str, exit_code: int) -> None:
        """Mark a step as ended."""
        self.steps()[step] |= {"ended": now(), "exit_code": exit_code}
        self._write()

    def list_files(self) -> None:
        """List the folder's files with their sizes and hashes, by which a receiver sees that all have come."""
        paths = sorted(path for path in self._folder.rglob("*") if path.is_file() and path != self._path)
        self._content["files"] = {
            str(path.relative_to(self._folder)): {
                "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()
            }
            for path in paths
        }  # fmt: skip
        self._write()

    def _resumed(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest that is there. Raises RequestError if it can't go on with what is wanted."""
        key = f"out={self._folder}"
        try:
            written = json.loads(self._path.read_text())
        except ValueError:
            raise RequestError(key, f"its {NAME} is not JSON", "another folder would work") from None
        if not isinstance(written, dict) or written.get("schema_version") != SCHEMA_VERSION:
            raise RequestError(key, f"its {NAME} is of another version", "another folder would work")
        if written["options"] != wanted["options"]:
            was = " ".join(f"{name}={value}" for name, value in written["options"].items())
            raise RequestError(key, f"belongs to {was}", "these keys, or another folder, would work")
        if written["code_version"] != wanted["code_version"]:
            rule = f"belongs to version {written['code_version']} of the code, and this is {wanted['code_version']}"
            raise RequestError(key, rule, "another folder would work")
        return written

    def _write(self) -> None:
        records.write_whole(self._path, json.dumps(self._content, indent=1) + "\n")


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
