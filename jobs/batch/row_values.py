"""Values of a table's columns as JSON has them, and back again."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jobs.batch.input_files import InputError

if TYPE_CHECKING:
    import pyarrow


def kept_schema(location: str, schema: "pyarrow.Schema", names: Iterable[str]) -> "pyarrow.Schema":
    """Return columns of a table as a Parquet file of results has them. Raise `InputError`."""
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


def json_rows(location: str, rows: "pyarrow.RecordBatch", names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield rows of a table with the values of JSON, text for others. Raise `InputError`."""
    columns = [_json_values(location, name, rows.column(name)) for name in names]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def as_array(values: list[Any], type: "pyarrow.DataType") -> "pyarrow.Array":
    """Return values of JSON as a column of the type that they were read from."""
    import pyarrow

    return pyarrow.array(values, _json_type(type)).cast(type)


def _json_values(location: str, name: str, column: Any) -> list[Any]:
    import pyarrow

    plain = column.cast(_plain_type(column.type))
    try:
        values: list[Any] = plain.cast(_json_type(plain.type)).to_pylist()
    except pyarrow.ArrowNotImplementedError:
        raise InputError(f"{location} has a column {name} of type {plain.type}, which cannot be read as text") from None
    except pyarrow.ArrowInvalid:
        raise InputError(f"{location} has a column {name} that holds bytes which are not UTF-8 text") from None
    return values


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
