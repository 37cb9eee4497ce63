"""Shows what a push found, or did."""

from __future__ import annotations

from typing import Any

from hybridize.console import Console, size


def show_dry_run(console: Console, report: dict[str, Any]) -> None:
    """The files, and everything that is wrong with them."""
    console.table(["file", "size"], [[file["name"], size(file["bytes"])] for file in report["files"]])
    if findings := report["findings"]:
        rows = [[finding["file"], finding["problem"]] for finding in findings]
        console.table(["file", "what is wrong"], rows, f"{len(findings)} to put right before a push")
    console.report(
        {
            "folder": report["folder"],
            "would be pushed to": report["repository"],
            "in all": size(report["bytes"]),
            "left out": report["left_out"] or None,
            "tensors": report["tensors"],
            "checksums compared": report["checksums"],
            "generation tried": report["generation_tried"],
            "model card": "your own README.md" if report["card_kept"] else "is written",
        },
        "Dry run: nothing is sent.",
    )


def show_push(console: Console, report: dict[str, Any]) -> None:
    """Where it is now."""
    console.report(
        {
            "repository": report["url"],
            "commit": f"{report['commit']} (nothing had changed)" if report["unchanged"] else report["commit"],
            **({"pull request": report["pull_request"]} if report["pull_request"] else {}),
            **({"removed there": report["removed"]} if report["removed"] else {}),
            "files": len(report["files"]),
            "in all": size(report["bytes"]),
        }
    )
