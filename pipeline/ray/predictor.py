"""A stage of Ray Data that lets a server or a fleet answer the rows."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batch_inference_pipeline import Rows


class Predictor:
    """A class for `Dataset.map_batches`: adds a column of answers to each block, and one of errors.

    Each actor of the stage is a client (`batch_inference_pipeline.Pipeline`), with one batch for
    each block.
    """

    def __init__(
        self,
        rows: "Rows",
        *,
        column: str = "answer",
        error_column: str = "error",
        parameters: dict[str, Any] | None = None,
        **client: Any,
    ) -> None:
        """Set up the stage; `parameters` are for all requests, `client` is passed to `Pipeline`."""
        from batch_inference_pipeline import Pipeline

        self._rows, self._column, self._error_column = rows, column, error_column
        self._parameters = parameters or {}
        self._pipeline = Pipeline(**client)

    def __call__(self, batch: Any) -> Any:
        """Return the rows with answers as a pyarrow.Table; `batch` has any format of Ray Data."""
        import pyarrow

        table = (
            pyarrow.table({name: list(values) for name, values in batch.items()})
            if isinstance(batch, dict)
            else (batch if isinstance(batch, pyarrow.Table) else pyarrow.Table.from_pandas(batch, preserve_index=False))
        )
        results = list(self._pipeline.map(table, rows=self._rows, return_errors=True, **self._parameters))
        answers = pyarrow.array([None if one.error is not None else one.value for one in results])
        if pyarrow.types.is_null(answers.type):
            answers = answers.cast(pyarrow.string())  # the type in blocks with answers
        errors = pyarrow.array([None if one.error is None else one.problem[1] for one in results], pyarrow.string())
        return table.append_column(self._column, answers).append_column(self._error_column, errors)
