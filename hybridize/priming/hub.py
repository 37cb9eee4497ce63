"""Datasets of the Hugging Face Hub, streamed: nothing is downloaded before it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from hybridize.errors import DataError, UsageError
from hybridize.priming.corpus import Content, content_of


class HubDataset:
    """A dataset `owner/name`, `owner/name:config` or `owner/name:config:split` (split train unless it is given).

    UsageError where the library datasets is missing; DataError where the dataset cannot be opened or its first example
    has neither text nor messages.
    """

    def __init__(self, name: str, text_field: str | None):
        try:
            import datasets
        except ImportError:
            raise UsageError(
                f"There is no file or folder {name}, and as a dataset of the Hub it needs the library datasets: pip "
                'install "hybridize[data]"'
            ) from None
        self.name, self.text_field = name, text_field
        self._library: Any = datasets
        self._whole = self._load(None)
        first = next(self._examples(self._whole), None)
        if first is None:
            raise DataError(f"The dataset {name} is empty; check the split's name.")
        self.chat = not isinstance(self._content(first), str)
        self.fingerprint = hashlib.sha256(json.dumps([name, first], default=str).encode()).hexdigest()

    def documents(self) -> Iterator[Content]:
        """Contents of all documents, empty ones included; one such iterator at a time."""
        return map(self._content, self._examples(self._whole))

    def read(self, position: dict[str, Any] | None) -> Reading:
        """The documents from a position on, or from the first."""
        dataset = self._load(position)
        return Reading(dataset, map(self._content, self._examples(dataset)))

    def _content(self, example: Any) -> Content:
        return content_of(example, self.text_field, f"An example of the dataset {self.name}")

    def _load(self, position: dict[str, Any] | None) -> Any:
        repository, config, split = (*self.name.split(":"), "", "")[:3]
        try:
            dataset = self._library.load_dataset(repository, config or None, split=split or "train", streaming=True)
            if position is not None:
                dataset.load_state_dict(position)
            return dataset
        except Exception as error:
            raise self._explained(error) from None

    def _examples(self, dataset: Any) -> Iterator[Any]:
        try:
            yield from dataset
        except Exception as error:
            raise self._explained(error) from None

    def _explained(self, error: Exception) -> DataError:
        # datasets raises ValueError for a config or split that is not there, and errors of fsspec, httpx and pyarrow as
        # they come.
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return DataError(
            f"The Hub dataset {self.name} cannot be read ({reason}); check its name, configuration and split, the "
            "connection, or log in with `hf auth login`."
        )


class Reading:
    """Documents one after another, and where that stands."""

    def __init__(self, dataset: Any, documents: Iterator[Content]):
        self.dataset, self.documents = dataset, documents

    def __iter__(self) -> Iterator[Content]:
        return self.documents

    def position(self) -> dict[str, Any]:
        """What `HubDataset.read` takes to go on from here, in JSON's types; only after a document was read."""
        state: dict[str, Any] = self.dataset.state_dict()
        return state
