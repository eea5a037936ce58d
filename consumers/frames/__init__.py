"""Tables of a run: Arrow underneath, streamed in bounded memory. Which there are: docs/tables.md.

What a table holds is as of the moment when it was opened, whatever the run does meanwhile; each reading reads the log
anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.schemas.errors import SettingsError

from ..source import LogSource
from . import rows
from .schema import SPECS, Column, Spec
from .tokens import tokens

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

__all__ = ["SPECS", "Column", "Spec", "Table", "export", "open_table"]

_ROWS = 1 << 14  # of a record batch that is made of Python's values
_MAKE: dict[str, Callable[[LogSource], Iterator[rows.Row]]] = {
    "spans": rows.spans, "episodes": rows.episodes, "groups": rows.groups, "batches": rows.batches,
    "versions": rows.versions, "replicas": rows.replicas, "publications": rows.publications, "waits": rows.waits,
    "tasks": rows.tasks, "evals": rows.evals,
}  # fmt: skip


class Table:
    """Use `Run.table`."""

    def __init__(self, source: LogSource, spec: Spec) -> None:
        self._source, self.spec = source, spec

    @property
    def name(self) -> str:
        """The table's name, as docs/tables.md has it."""
        return self.spec.name

    @property
    def schema(self) -> pyarrow.Schema:
        """Units and meanings are in the fields' metadata."""
        return self.spec.arrow()

    def batches(self) -> Iterator[pyarrow.RecordBatch]:
        """In order; some 16,000 to 40,000 rows each, whatever the length of the run. Raises LogError, DataLossError."""
        if self.name == "tokens":
            yield from tokens(self._source)
            return
        import pyarrow as pa

        schema, found = self.schema, _MAKE[self.name](self._source)
        while some := list(islice(found, _ROWS)):
            columns = [pa.array([row.get(c.name) for row in some], schema.field(c.name).type)
                       for c in self.spec.columns]  # fmt: skip
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def reader(self) -> pyarrow.RecordBatchReader:
        """The same as Arrow's reader: DuckDB, polars and others take it as it is."""
        import pyarrow as pa

        return pa.RecordBatchReader.from_batches(self.schema, self.batches())

    def to_arrow(self) -> pyarrow.Table:
        """All of it, in memory; categories unified."""
        return self.reader().read_all().unify_dictionaries()

    def to_pandas(self) -> pandas.DataFrame:
        """As pandas; whole numbers that may be null are pandas' nullable ones, never floats."""
        import pandas as pd
        import pyarrow as pa

        nullable = {pa.int32(): pd.Int32Dtype(), pa.int64(): pd.Int64Dtype()}
        return self.to_arrow().to_pandas(types_mapper=nullable.get)

    def to_polars(self) -> polars.DataFrame:
        """As polars."""
        frame: polars.DataFrame = _need("polars").from_arrow(self.to_arrow())
        return frame

    def to_parquet(self, file: str | os.PathLike[str]) -> int:
        """Write it, batch by batch, zstd; the number of rows. The file appears whole or not at all."""
        import pyarrow.parquet as pq

        path = Path(file)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        count = 0
        try:
            with pq.ParquetWriter(aside, self.schema, compression="zstd") as writer:
                for batch in self.batches():
                    writer.write_batch(batch)
                    count += batch.num_rows
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        return count


def open_table(source: LogSource, name: str) -> Table:
    """Raises SettingsError for a name that is none, and where pyarrow is missing."""
    if name not in SPECS:
        raise SettingsError(f"no table {name!r}: use one of {', '.join(SPECS)}")
    _need("pyarrow")
    return Table(source, SPECS[name])


def export(source: LogSource, folder: str | os.PathLike[str], names: Sequence[str] = ()
           ) -> Iterator[tuple[Table, Path, int]]:  # fmt: skip
    """Write the tables (all by default) to FOLDER/NAME.parquet, one after the other; each with its file and rows.
    Raises SettingsError where the folder can't be made."""
    tables = [open_table(source, name) for name in names or SPECS]
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{path} can't be made: {error}") from error
    for table in tables:
        file = path / f"{table.name}.parquet"
        try:
            count = table.to_parquet(file)
        except OSError as error:
            raise SettingsError(f"{file} can't be written: {error}") from error
        yield table, file, count


def _need(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise SettingsError(f"tables need {package}, which is not installed: pip install 'headrace[frames]'") from error
