"""Pages with separately measured sections: a section that was not measured again stays as it is."""

from pathlib import Path


def heading(section: str) -> str:
    return section.split("\n", 1)[0]


def parts(page: str) -> list[str]:
    """The text before the first `## ` heading, then each section."""
    first, *rest = page.strip().split("\n## ")
    return [first.strip(), *(f"## {section.strip()}" for section in rest)]


def put(path: Path, introduction: str, sections: list[str]) -> None:
    """Write the introduction and these sections. Other sections of the page stay where they are; new ones go last."""
    old = parts(path.read_text(encoding="utf-8"))[1:] if path.exists() else []
    new = {heading(section): section.strip() for section in sections}
    kept = [new.pop(heading(section), section) for section in old]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join([introduction.strip(), *kept, *new.values()]) + "\n", encoding="utf-8")
