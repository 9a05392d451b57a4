"""Conversion of a table's values to JSON, and back."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jobs.batch.input_files import InputError

if TYPE_CHECKING:
    import pyarrow


def kept_schema(location: str, schema: "pyarrow.Schema", names: Iterable[str]) -> "pyarrow.Schema":
    """Return the schema of a table's columns in a Parquet file of results. Raise `InputError`."""
    import pyarrow

    fields = [pyarrow.field(name, _plain_type(schema.field(name).type)) for name in names]
    for field in fields:
        try:
            pyarrow.nulls(0, _json_type(field.type)).cast(field.type)
        except pyarrow.ArrowNotImplementedError:
            raise InputError(
                f"{location} has a column {field.name} of type {field.type}, which cannot be kept"
            ) from None
    return pyarrow.schema(fields)


def json_rows(
    location: str, rows: "pyarrow.RecordBatch", names: Sequence[str], kept: Collection[str] = (), before: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield rows of a table with JSON values, other types as text; `before` rows were read earlier.

    Raise `InputError`, also for a value of a `kept` column that its text does not restore.
    """
    columns = [_read(location, name, rows.column(name), _json_values, before) for name in names]
    for name, values in zip(names, columns, strict=True):
        if name in kept:
            _check_kept(location, name, rows.column(name), values, before)
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


def python_rows(
    location: str, rows: "pyarrow.RecordBatch", names: Sequence[str], before: int
) -> Iterator[dict[str, Any]]:
    """Yield rows of a table with Python values."""
    columns = [_read(location, name, rows.column(name), _python_values, before) for name in names]
    for row in zip(*columns, strict=True):
        yield dict(zip(names, row, strict=True))


def no_text(location: str, name: str, row: int) -> InputError:
    """Return the error for a table with bytes that are not text; rows count from 1."""
    return InputError(
        f"{location} has a column {name} that holds bytes which are not UTF-8 text, first in row {row}: write the file"
        " again with text there"
    )


def as_array(values: list[Any], type: "pyarrow.DataType") -> "pyarrow.Array":
    """Return JSON values as a column of their original type."""
    import pyarrow

    return pyarrow.array(values, _json_type(type)).cast(type)


_Values = Callable[["pyarrow.Array"], list[Any]]


def _read(location: str, name: str, column: "pyarrow.Array", values_of: _Values, before: int) -> list[Any]:
    import pyarrow

    try:
        return values_of(column)
    except pyarrow.ArrowNotImplementedError:
        kind = _plain_type(column.type)
        raise InputError(f"{location} has a column {name} of type {kind}, which cannot be read as text") from None
    except (ValueError, OverflowError) as error:
        bad = next(row for row in range(len(column)) if not _can_be_read(column.slice(row, 1), values_of))
        row = before + bad + 1
        if isinstance(error, UnicodeDecodeError | pyarrow.ArrowInvalid):
            raise no_text(location, name, row) from None
        raise InputError(
            f"{location} has a {column.type} in row {row} of the column {name} that cannot be read: {error}"
        ) from None


def _can_be_read(column: "pyarrow.Array", values_of: _Values) -> bool:
    try:
        values_of(column)
    except (ValueError, OverflowError):
        return False
    return True


def _python_values(column: "pyarrow.Array") -> list[Any]:
    """Return the values; floats and decimals have the fewest digits that restore them."""
    from pyarrow import types

    if types.is_decimal(column.type):
        return [None if value is None else format(value, "f") for value in column.to_pylist()]
    return list(_widened(column).to_pylist())


def _json_values(column: "pyarrow.Array") -> list[Any]:
    from pyarrow import types

    plain = column.cast(_plain_type(column.type))
    values = _python_values(plain if types.is_decimal(plain.type) else plain.cast(_json_type(plain.type)))
    if types.is_temporal(plain.type) and any(value is not None and value.startswith("<") for value in values):
        raise OverflowError("it is out of range")  # of the years that Arrow supports
    return values


def _widened(column: "pyarrow.Array") -> "pyarrow.Array":
    """Return a column with each float32 as the float64 of the same shortest text: 0.1 stays 0.1."""
    import pyarrow

    text = _without_float32(column.type, pyarrow.string())
    return column if text == column.type else column.cast(text).cast(_without_float32(column.type, pyarrow.float64()))


def _without_float32(type: "pyarrow.DataType", other: "pyarrow.DataType") -> "pyarrow.DataType":
    import pyarrow
    from pyarrow import types

    if types.is_float32(type):
        return other
    if types.is_struct(type):
        return pyarrow.struct([field.with_type(_without_float32(field.type, other)) for field in type])
    if types.is_list(type) or types.is_large_list(type) or types.is_fixed_size_list(type):
        item = type.value_field.with_type(_without_float32(type.value_type, other))
        if types.is_fixed_size_list(type):
            return pyarrow.list_(item, type.list_size)
        return pyarrow.list_(item) if types.is_list(type) else pyarrow.large_list(item)
    return type


def _check_kept(location: str, name: str, column: "pyarrow.Array", values: list[Any], before: int) -> None:
    """Raise `InputError` for a value that its text does not restore, such as a year after 9999."""
    plain = column.cast(_plain_type(column.type))
    if _is_json(plain.type) or _gives_back(values, plain):
        return
    bad = next(row for row in range(len(values)) if not _gives_back(values[row : row + 1], plain.slice(row, 1)))
    raise InputError(
        f"{location} has a {plain.type} in row {before + bad + 1} of the column {name} that cannot be kept:"
        f" {values[bad]}; change it, or leave the column out of --keep-columns"
    )


def _gives_back(values: list[Any], plain: "pyarrow.Array") -> bool:
    import pyarrow

    try:
        return bool(as_array(values, plain.type).equals(plain))
    except pyarrow.ArrowInvalid:
        return False


def _plain_type(type: "pyarrow.DataType") -> "pyarrow.DataType":
    from pyarrow import types

    return type.value_type if types.is_dictionary(type) else type


def _json_type(type: "pyarrow.DataType") -> "pyarrow.DataType":
    import pyarrow

    return type if _is_json(type) else pyarrow.string()


def _is_json(type: "pyarrow.DataType") -> bool:
    from pyarrow import types

    if types.is_list(type) or types.is_large_list(type) or types.is_fixed_size_list(type):
        return _is_json(type.value_type)
    if types.is_struct(type):
        return all(_is_json(field.type) for field in type)
    known = (types.is_string, types.is_large_string, types.is_boolean, types.is_integer, types.is_floating)
    return types.is_null(type) or any(one(type) for one in known)
