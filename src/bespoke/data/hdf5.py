"""TensorFlow Federated's HDF5 files: a group `examples` with a group per client, which holds an array per field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bespoke.data.sources import damaged
from bespoke.errors import needs_extra


def client_ids(path: Path, source: str, layout: str) -> list[str]:
    """The clients of a file, sorted."""
    return [client for client, _ in read_clients(path, source, (), layout)]


def read_clients(
    path: Path, source: str, fields: Sequence[str], layout: str, clients: Sequence[str] | None = None
) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
    """Each client (or each of `clients`) with its arrays; `layout` is what an error says was expected."""
    try:
        import h5py
    except ImportError:
        raise needs_extra("h5py", "tff", f"the source {source!r}") from None
    try:
        with h5py.File(path) as file:
            if not isinstance(file.get("examples"), h5py.Group):
                raise damaged(path, f"the groups {sorted(file)[:5]}", layout)
            examples = file["examples"]
            for client in sorted(examples) if clients is None else clients:
                if not fields:
                    yield client, {}
                    continue
                group = examples[client]
                missing = [field for field in fields if not isinstance(group, h5py.Group) or field not in group]
                if missing:
                    raise damaged(path, f"examples/{client} without {', '.join(missing)}", layout)
                arrays = {field: group[field][()] for field in fields}
                if len({array.shape[:1] for array in arrays.values()}) > 1:
                    shapes = ", ".join(f"{field} {array.shape}" for field, array in arrays.items())
                    raise damaged(path, f"examples/{client} with {shapes}", "as many rows in each")
                yield client, arrays
    except OSError as error:
        raise damaged(path, f"no readable HDF5 file ({error})", "TensorFlow Federated's HDF5 file") from None


def texts(path: Path, client: str, field: str, array: NDArray[Any]) -> list[bytes]:
    """An array of texts as bytes."""
    if array.ndim != 1 or array.dtype.kind not in "SO":
        raise damaged(path, f"examples/{client}/{field} of type {array.dtype}", "a list of texts")
    return [bytes(text) for text in array]
