"""Parquet files: one document a row, text or a conversation."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from hybridize.errors import DataError, UsageError
from hybridize.priming.corpus import Content, content_of, section


class Parquet:
    """The text or messages column of a Parquet file, held in memory in Arrow's compact form."""

    per_token = 4

    def __init__(self, file: Path, name: str, text_field: str | None):
        try:
            import pyarrow
            import pyarrow.compute
            import pyarrow.parquet
        except ImportError:
            raise UsageError(f'{file} needs pyarrow, which is not installed: pip install "hybridize[data]"') from None
        self.name = name
        names = [text_field] if text_field else ["text", "messages"]
        try:
            opened = pyarrow.parquet.ParquetFile(file)
            columns = set(opened.schema_arrow.names)
            self.field = next((field for field in names if field in columns), None)
            if self.field is None:
                raise DataError(
                    f"{file} has the columns {', '.join(sorted(columns))}, but not {' or '.join(names)}; name the "
                    "right one with --text-field."
                )
            self.column: Any = opened.read(columns=[self.field]).column(0)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise DataError(f"{file} is not a readable Parquet file ({error}); write or download it again.") from None
        kinds, kind = pyarrow.types, self.column.type
        text = kinds.is_string(kind) or kinds.is_large_string(kind)
        if text:
            sizes = pyarrow.compute.utf8_length(pyarrow.compute.utf8_trim_whitespace(self.column))
        elif (kinds.is_list(kind) or kinds.is_large_list(kind)) and kinds.is_struct(kind.value_type):
            sizes = pyarrow.compute.list_value_length(self.column)
        else:
            raise DataError(
                f"The column {self.field} of {file} holds {kind}, neither text nor lists of messages; name another "
                "with --text-field."
            )
        self.rows = np.flatnonzero(sizes.fill_null(0).to_numpy() > 0)
        self.where = str(file)
        if text:
            self.lengths = pyarrow.compute.utf8_length(self.column).fill_null(0).to_numpy()[self.rows].astype(np.int64)
        else:
            self.lengths = np.zeros(len(self.rows), dtype=np.int64)
            for index in range(min(1, len(self.rows))):
                self.read(index, 0, 0)  # messages of another form are best refused at once
        with file.open("rb") as raw:
            self.fingerprint = hashlib.file_digest(raw, "sha256").hexdigest()

    def title(self, index: int) -> str:
        return f"{self.name}:{self.rows[index] + 1}"

    def read(self, index: int, start: int, stop: int) -> Content:
        row = int(self.rows[index])
        record = {self.field: self.column[row].as_py()}
        content = content_of(record, self.field, f"Row {row + 1} of {self.where}")
        return section(content, start, stop) if isinstance(content, str) else content
